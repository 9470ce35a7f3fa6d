"""The autoencoder's losses against their formulas, and its export as others open it."""

import json

import pytest
import torch
from diffusers import AutoencoderKL

from recipes.encoders.vae import kl_vae
from recipes.models.kl_autoencoder.task import MEASURED, KLAutoencoder, to_signed

SIZES = {"channels": [8, 16], "blocks": 1, "norm_groups": 4, "middle_attention": False}


def small(**changes):
    torch.manual_seed(2)
    return KLAutoencoder(**(SIZES | {"kl_weight": 0.5} | changes))


def pictures(count=6, seed=4):
    """Blobs of colour, (B, 3, 16, 16) uint8."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(coarse, size=16, mode="bilinear") * 255).to(torch.uint8)


def test_signed():
    assert to_signed(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16])
def test_training_loss_is_its_formula(lower):
    """Under autocast, too, the posterior is computed in 32 bits."""
    task, images = small(), pictures()
    x = to_signed(images)
    with torch.autocast("cpu", lower or torch.bfloat16, enabled=lower is not None):
        torch.manual_seed(9)
        losses = task({"image": images})
        mean, logvar = task.network.encode(x).latent_dist.parameters.float().chunk(2, dim=1)
        torch.manual_seed(9)
        z = mean + (logvar / 2).exp() * torch.randn_like(mean)
        l1 = (task.network.decode(z).sample.float() - x).abs().mean()
    kl = (mean**2 + logvar.exp() - 1 - logvar).mean() / 2
    torch.testing.assert_close(losses["l1"], l1.detach())
    torch.testing.assert_close(losses["kl"], kl.detach())
    torch.testing.assert_close(losses["total"], l1 + 0.5 * kl)
    assert losses["total"].requires_grad and not losses["l1"].requires_grad


def test_evaluation_is_a_sample_at_a_time_from_the_mean():
    task, images = small().eval(), pictures()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    figures = task.evaluate({"image": images})
    assert (torch.get_rng_state() == state).all() and list(figures) == ["loss", "l1", "psnr"] == task.eval_names
    with torch.no_grad():
        made = task.network.decode(task.network.encode(to_signed(images)).latent_dist.mean).sample.clamp(-1, 1)
    for i in range(6):
        error = made[i] - to_signed(images[i])
        torch.testing.assert_close(figures["l1"][i], error.abs().mean())
        # In dB of the range 0 to 1.
        torch.testing.assert_close(
            figures["psnr"][i], -10 * ((made[i] / 2 - images[i] / 255 + 0.5) ** 2).mean().log10()
        )
        torch.testing.assert_close(task.evaluate({"image": images[i : i + 1]})["l1"][0], figures["l1"][i])
    assert (figures["loss"] == figures["l1"]).all()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A task that has seen 500 batches, and its export."""
    task, folder = small().train(), tmp_path_factory.mktemp("vae")
    with torch.no_grad():
        task.network.quant_conv.bias[:4] += 1.5  # so that there is a shift to find
        for i in range(500):
            task({"image": pictures(4, seed=i % 20)})
    task.eval().export(folder)
    return task, folder


def test_exported_latents_are_of_unit_deviation(exported):
    task, folder = exported
    config = json.loads((folder / "config.json").read_text())
    images = torch.cat([pictures(4, seed=i) for i in range(20)])
    encoder = kl_vae(path=str(folder), precision="fp32")
    assert (encoder.scaling_factor, encoder.shift_factor) == (config["scaling_factor"], config["shift_factor"])
    mean, deviation = encoder.encode(images)
    drawn = mean + deviation * torch.randn(mean.shape, generator=torch.Generator().manual_seed(1))
    assert abs(drawn.mean()) < 0.03 and abs(drawn.std() - 1) < 0.03
    assert abs(config["shift_factor"]) > 0.3  # it was not found by doing nothing


def test_moments_are_tracked_in_training_only(exported):
    task, _ = exported
    before = task.latent_moments.clone()
    task({"image": pictures()})
    task.evaluate({"image": pictures()})
    assert (task.latent_moments == before).all()


def test_a_batch_that_is_not_finite_leaves_the_moments_as_they_are():
    """Its update is skipped and training goes on, so that the export needs a scaling factor."""
    found = []
    for overflows in (False, True):
        task = small().train()
        for number in range(4):
            bias = task.network.encoder.conv_in.bias.data
            before = bias.clone()
            if number == 2 and overflows:
                bias.fill_(torch.inf)
                assert not task({"image": pictures()})["total"].isfinite()
                bias.copy_(before)
            torch.manual_seed(number)
            task({"image": pictures(4, seed=number)})
        found.append((task.latent_batches.item(), task.latent_moments.tolist()))
    assert found[0] == found[1] and found[0][0] == 4


@torch.no_grad()
def test_moments_of_some_images_are_those_of_draws_from_them():
    """Of few images: a batch may fit on a device only as microbatches."""
    task, images = small(), pictures(MEASURED + 4)
    found = task.measure({"image": images})
    assert torch.equal(found, task.measure({"image": images[:MEASURED]}))
    assert not torch.equal(found, task.measure({"image": images[4:]}))
    posterior = task.network.encode(to_signed(images[:MEASURED])).latent_dist
    draws = torch.stack([posterior.sample() for _ in range(200)])  # 200 x 16 x 4 x 8 x 8 values, whose error is 1 / 900
    expected = torch.stack([draws.mean(), draws.square().mean()])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_diffusers_opens_the_export(exported):
    task, folder = exported
    assert {file.name for file in folder.iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}
    vae = AutoencoderKL.from_pretrained(str(folder), low_cpu_mem_usage=False).eval()
    images = pictures(seed=77)
    with torch.no_grad():
        theirs = vae.decode(vae.encode(to_signed(images)).latent_dist.mode()).sample.clamp(-1, 1)
        assert (theirs == task.reconstruct(to_signed(images))).all()
    # The same through the encode job's encoder, which normalises and takes it back.
    encoder = kl_vae(path=str(folder), precision="fp32")
    assert (encoder.downsample, encoder.channels) == (2, 4)
    torch.testing.assert_close(encoder.decode(encoder.encode(images)[0]), (theirs + 1) / 2, rtol=0, atol=1e-5)


def test_weights_come_back_strictly(exported):
    task, folder = exported
    other = small()
    other.load_export(folder)
    images = pictures(seed=3)
    assert (other.eval().evaluate({"image": images})["l1"] == task.evaluate({"image": images})["l1"]).all()
    with pytest.raises(ValueError, match="does not fit the model"):
        small(channels=[8, 8]).load_export(folder)


def test_widths_must_be_multiples_of_the_groups():
    with pytest.raises(ValueError, match=r"channels \[8, 18\] must be multiples of norm_groups \(4\)"):
        small(channels=[8, 18])
