"""The dVAE's training loss against its formula, its figures, and its export."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from recipes.algorithms.sharding.shard import shard
from recipes.models.dvae.files import load_dvae
from recipes.models.dvae.loss import relax
from recipes.models.dvae.task import DiscreteAutoencoder

SIZES = {"codes": 24, "hidden": 8, "blocks": 1, "initial": 5}


def small(**changes):
    torch.manual_seed(2)
    return DiscreteAutoencoder(**(SIZES | changes))


def pictures(count=4, side=16, seed=4):
    """Blobs of colour, (B, 3, side, side) uint8."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(coarse, size=side, mode="bilinear") * 255).to(torch.uint8)


@pytest.mark.parametrize(("side", "beta", "least"), [(16, 6.6, 0.0), (32, 0.5, 0.0), (16, 6.6, 0.3)])
def test_training_loss_is_the_bound_over_all_colours(side, beta, least):
    """-(sum of ln f) + beta * (sum of KL), over 3 R^2, and so beta / 192 for the mean KL of a place."""
    task, images = small(beta=beta, temperature=0.4, least_scale=least), pictures(side=side)
    torch.manual_seed(9)
    losses = task({"image": images})
    x = images.double() / 255 * 0.8 + 0.1
    logits = task.network.logits(images / 255)
    torch.manual_seed(9)
    mean, log_scale = (t.double() for t in task.network.statistics(relax(logits, 0.4)))
    b = log_scale.exp() + least
    log_f = torch.log(1 / (2 * b * x * (1 - x))) - (torch.log(x / (1 - x)) - mean).abs() / b
    q = logits.double().softmax(1)
    kl = (q * (q * 24).log()).sum(1)  # (B, G, G)
    bound = -log_f.sum((1, 2, 3)) + beta * kl.sum((1, 2))  # nats a picture
    assert losses["total"].item() == pytest.approx((bound / (side * side * 3)).mean().item(), rel=1e-5)
    assert losses["nll"].item() == pytest.approx(-log_f.mean().item(), rel=1e-5)
    assert losses["kl"].item() == pytest.approx(kl.mean().item(), rel=1e-4)
    assert losses["total"].item() == pytest.approx((-log_f.mean() + beta / 192 * kl.mean()).item(), rel=1e-5)
    assert losses["total"].requires_grad and not losses["kl"].requires_grad and not losses["nll"].requires_grad


def test_every_weight_learns():
    task = small()
    task({"image": pictures()})["total"].backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in task.parameters())


def test_it_learns_colours_by_heart():
    task = small(beta=0.1, temperature=0.5)
    colours = torch.tensor([[255, 0, 0], [0, 200, 0], [0, 0, 255], [250, 250, 250], [0, 0, 0]], dtype=torch.uint8)
    images = colours[:, :, None, None].repeat(2, 1, 8, 8)
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-2)
    before = task.evaluate({"image": images})
    for _ in range(100):
        optimizer.zero_grad()
        task({"image": images})["total"].backward()
        optimizer.step()
    after = task.evaluate({"image": images})
    assert after["nll"].mean() < before["nll"].mean() - 0.4 and after["psnr"].mean() > before["psnr"].mean() + 1


def test_evaluation_is_a_picture_at_a_time_from_the_likeliest_codes():
    task, images = small(beta=3.0).eval(), pictures()
    state = torch.get_rng_state()
    figures = task.evaluate({"image": images})
    assert (torch.get_rng_state() == state).all() and task.eval_names == [name for name in figures if name != "codes"]
    assert figures["codes"].shape == (4, 2, 2) and (figures["codes"] == task.network.tokens(images / 255)).all()
    made = task.network.decode(figures["codes"])
    torch.testing.assert_close(task.reconstruct(images / 127.5 - 1), made * 2 - 1)
    for i in range(4):
        error = ((made[i] - images[i] / 255) ** 2).mean()
        torch.testing.assert_close(figures["psnr"][i], -10 * error.log10(), rtol=1e-5, atol=0)
        alone = task.evaluate({"image": images[i : i + 1]})
        for name in task.eval_names:
            torch.testing.assert_close(alone[name][0], figures[name][i], rtol=1e-5, atol=1e-6)
    # At beta 1 whatever training's is: figures of several runs compare.
    torch.testing.assert_close(figures["loss"], figures["nll"] + figures["kl"] / 192)
    assert (figures["kl"] >= 0).all() and (figures["kl"] <= math.log(24)).all()


def test_scheduled_values_are_no_part_of_a_checkpoint():
    task = small(beta=2.0, temperature=0.5)
    assert {name: float(getattr(task, name)) for name in task.scheduled} == {"beta": 2.0, "temperature": 0.5}
    assert all(name.startswith("network.") for name in task.state_dict())


def test_blocks_are_called_through_their_forward():
    task, called = small(), []
    for block in task.blocks():
        block.register_forward_hook(lambda module, *_: called.append(module))
    task({"image": pictures()})
    assert called == task.blocks() and len(called) == 8


def test_weights_come_back_strictly(tmp_path):
    task, images = small(), pictures()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    task.export(tmp_path)
    other = small()
    other.load_export(tmp_path)
    assert (other.evaluate({"image": images})["nll"] == task.evaluate({"image": images})["nll"]).all()
    assert (load_dvae(tmp_path).tokens(images / 255) == task.network.tokens(images / 255)).all()
    with pytest.raises(ValueError, match="does not fit the model"):
        small(codes=25).load_export(tmp_path)


@pytest.mark.parametrize("wrong", [{"beta": -1.0}, {"temperature": 0.0}, {"least_scale": -0.1}])
def test_values_that_make_no_loss(wrong):
    with pytest.raises(ValueError, match="dvae: beta .*: give 0 or more, and a temperature above 0"):
        small(**wrong)


def test_sharded_in_16_bit_the_convolutions_around_the_relaxation_have_32(one_rank):
    task, kinds = small(), {}
    for name, module in task.network.named_modules():
        if hasattr(module, "w"):
            module.register_forward_hook(lambda module, *_, name=name: kinds.update({name: module.w.dtype}))
    units = shard(task, init_device_mesh("cpu", (1,)), parameters=torch.bfloat16)
    assert units == 8 + 1
    with torch.autocast("cpu", torch.bfloat16):
        losses = task({"image": pictures()})
    losses["total"].backward()
    full = {name for name, dtype in kinds.items() if dtype == torch.float32}
    relaxed = {"encoder.blocks.output.conv", "decoder.blocks.input"}
    # The others outside of blocks are gathered in 32 bits, too, but autocast reduces them.
    assert full == relaxed | {"encoder.blocks.input", "decoder.blocks.output.conv"} and len(kinds) == 43
    modules = dict(task.network.named_modules())
    assert {name for name in full if modules[name].full_precision} == relaxed
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert task.reconstruct(pictures() / 127.5 - 1).shape == (4, 3, 16, 16)
