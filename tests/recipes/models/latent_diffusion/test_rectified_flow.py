"""Rectified flow against closed forms and diffusers' scheduler, and from an export to images."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from recipes.config.components import COMPONENTS
from recipes.config.schema import Component
from recipes.generate import main
from recipes.models.latent_diffusion.objective import seeded_noise
from recipes.models.latent_diffusion.rectified_flow import RectifiedFlow, shift_times
from tests.fuzzing import few

SHAPE = (4, 8, 8)


def sample(denoise, steps, guidance=1.0, count=3, shift=1.0):
    noise = seeded_noise(list(range(count)), SHAPE)
    text, null_text = torch.ones(count, 1, 1), torch.zeros(1, 1)
    return noise, RectifiedFlow(shift=shift).sample(denoise, noise, text, null_text, steps, guidance)


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_the_exact_velocity_of_a_point_leads_to_it(steps):
    """Where the data is one point, the velocity at x_t is (x_t - point) / t, and paths are straight."""
    point = torch.linspace(-2, 2, 256).reshape(SHAPE)
    _, made = sample(lambda x, times, text: (x - point) / (times / 1000).reshape(-1, 1, 1, 1), steps)
    torch.testing.assert_close(made, point.expand(3, *SHAPE), rtol=0, atol=1e-4)


def test_the_velocity_of_a_gaussian_leads_to_its_quantiles():
    """x_t is N((1 - t) m, (1 - t)^2 d^2 + t^2); with many steps, noise z ends at m + d z."""
    m, d = 0.7, 0.5

    def denoise(x, times, text):
        t = (times / 1000).reshape(-1, 1, 1, 1)
        variance = (1 - t) ** 2 * d**2 + t**2
        return -m + (t - (1 - t) * d**2) / variance * (x - (1 - t) * m)

    noise, made = sample(denoise, 500)
    torch.testing.assert_close(made, m + d * noise, rtol=0, atol=0.01)


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_the_steps_are_those_of_diffusers(tmp_path, shift):
    seen = []

    def velocity(x, t):
        return torch.sin(3 * x) - t / 1000

    def denoise(x, times, text):
        seen.append(times[0])
        return velocity(x, times.reshape(-1, 1, 1, 1))

    RectifiedFlow(shift=shift).save(tmp_path)
    assert RectifiedFlow.open(tmp_path).shift == shift
    noise, made = sample(denoise, 6, shift=shift)
    # The second one, of the export for `StableDiffusionPipeline`, rounds the times that the network is given.
    for scheduler, error in (
        (FlowMatchEulerDiscreteScheduler.from_pretrained(str(tmp_path)), 1e-3),
        (RectifiedFlow(shift=shift).for_diffusers(), 1.0),
    ):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 6, 6))
        torch.testing.assert_close(torch.stack(seen), scheduler.timesteps.float(), rtol=0, atol=error)
        latents = noise
        for timestep in scheduler.timesteps:
            latents = scheduler.step(velocity(latents, timestep), timestep, latents, return_dict=False)[0]
        torch.testing.assert_close(made, latents, rtol=1e-5, atol=max(1e-5, error / 1000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dynamic_shifting": True}, "has 1000 training timesteps and a fixed shift"),
        ({"shift": "3"}, "config.json: shift must be a number above 0, got 3"),
        ({"shift": 0}, "config.json: shift must be a number above 0, got 0"),
    ],
)
def test_a_scheduler_whose_times_are_others_is_refused(tmp_path, options, message):
    RectifiedFlow().save(tmp_path)
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    with pytest.raises(ValueError, match=message):
        RectifiedFlow.open(tmp_path)


@few
@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_shifted_times(s, other):
    times = torch.linspace(0, 1, 1001, dtype=torch.float64)
    shifted = shift_times(times, s)
    assert shifted[0] == 0 and abs(shifted[-1] - 1) < 1e-12 and (shifted.diff() > 0).all()
    torch.testing.assert_close(shift_times(shifted, other), shift_times(times, s * other), rtol=1e-9, atol=0)
    # In terms of log(t / (1 - t)) it adds log(s), so that logit-normal times stay logit-normal.
    torch.testing.assert_close(torch.logit(shifted[1:-1]), torch.logit(times[1:-1]) + math.log(s), rtol=0, atol=1e-9)
    assert torch.equal(shift_times(times.float(), 1.0), times.float())


@pytest.mark.parametrize("times", ["uniform", "logit_normal"])
def test_training_and_sampling_shift_the_same_times(times):
    x0 = torch.zeros(1000, 1, 1, 1)
    torch.manual_seed(0)
    plain = RectifiedFlow(times=times).draw(x0)[1]
    torch.manual_seed(0)
    assert torch.equal(RectifiedFlow(times=times, shift=3.0).draw(x0)[1], shift_times(plain, 3.0))


def test_the_loss_is_the_naive_one():
    generator = torch.Generator().manual_seed(1)
    x0, noise = torch.randn(5, *SHAPE, generator=generator), torch.randn(5, *SHAPE, generator=generator)
    times = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
    seen = []

    def predict(x, t):
        seen.append(t)
        return (0.3 * x).bfloat16()

    losses = RectifiedFlow()(predict, x0, noise, times)
    assert losses.shape == (5,) and losses.dtype == torch.float32 and torch.equal(seen[0], 1000 * times)
    for i, t in enumerate(times.tolist()):
        guess = (0.3 * ((1 - t) * x0[i] + t * noise[i])).bfloat16().float()
        torch.testing.assert_close(losses[i], (guess - (noise[i] - x0[i])).square().mean(), rtol=1e-4, atol=0)


def test_times_follow_their_distribution():
    x0 = torch.zeros(20_000, 1, 1, 1)
    torch.manual_seed(0)
    uniform = RectifiedFlow(times="uniform").draw(x0)[1]
    assert 0 <= uniform.min() < 0.01 and 0.99 < uniform.max() <= 1
    torch.testing.assert_close(uniform.sort().values, torch.linspace(0, 1, 20_000), rtol=0, atol=0.02)
    normal = torch.logit(RectifiedFlow(mean=-0.5, deviation=2.0).draw(x0)[1])
    assert abs(normal.mean() + 0.5) < 0.05 and abs(normal.std() - 2) < 0.05


def test_values_that_cannot_be():
    with pytest.raises(ValueError, match="deviation must be above 0"):
        RectifiedFlow(deviation=0.0)
    for shift in (-1.0, 0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="shift must be above 0"):
            RectifiedFlow(shift=shift)
    assert RectifiedFlow(eval_times=[0, 1]).eval_times == [0, 1]
    for times in ([], [1.5], [-0.1], [0.5, 1.5]):
        with pytest.raises(ValueError, match=r"give at least one, all in \[0, 1\]"):
            RectifiedFlow(eval_times=times)
    with pytest.raises(ValueError, match="sampler: `ddim` is unknown to rectified_flow; allowed: euler"):
        RectifiedFlow().check_sampler("ddim")


SIZES = {"width": 16, "layers": 1, "heads": 2, "text_width": 16}
# Levers that have nothing to change elsewhere.
OF_UNETS = ("attention", "channels_last", "fused_group_norm", "lean_blocks", "fused_geglu", "cudnn_benchmark")
SMALL_DIT = Component("denoiser", "dit", SIZES, COMPONENTS["denoiser"]["dit"], "denoiser")


@pytest.mark.parametrize(("network", "denoiser"), [("unet", None), ("transformer", SMALL_DIT)])
def test_a_run_exports_and_generates(tmp_path, small_recipe, fit, network, denoiser):
    """Training, validation, sample grid, export and generate.py know objective and denoiser by their names alone."""
    recipe = small_recipe(
        tmp_path / "run",
        "model.objective={name: rectified_flow, eval_times: [0.25, 0.75]}",
        *([] if denoiser is None else [f"algorithms.{name}=null" for name in OF_UNETS]),
        "training.duration=4ba",
        "callbacks.export={name: export}",
        "callbacks.sample_grid={name: sample_grid, prompts: [a dot], steps: 2}",
    )
    if denoiser is not None:
        recipe.model.args["denoiser"] = denoiser
    trainer = fit(recipe)
    assert {"loss", "loss_t0.25", "loss_t0.75"} <= set(trainer.state.eval_metrics["val"])
    export = tmp_path / "run" / "export"
    record = json.loads((export / "export.json").read_text())
    assert (record["family"], record["network"], record["objective"]) == ("latent_diffusion", network, "rectified_flow")
    scheduler = json.loads((export / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    command = ["--prompts", "a dot", "a star", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "grid.png")]
    main([str(export), *command])
    with Image.open(tmp_path / "grid.png") as image:
        assert image.format == "PNG"
