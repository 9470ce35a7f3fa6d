"""Rectified flow: straight paths from data to noise, and the velocity along them (Liu et al. 2022)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from data.random_numbers import Draws
from recipes.models.json_files import is_number, read_object
from recipes.models.latent_diffusion.objective import GLOBAL, Objective, Predict

# Networks embed times as they embed the timesteps of diffusion, whose range is [0, 1000).
TIME_SCALE = 1000


class RectifiedFlow(Objective):
    """Rectified flow (Liu et al. 2022, Esser et al. 2024): x_t = (1 - t) x_0 + t noise, target noise - x_0."""

    name = "rectified_flow"
    samplers = ("euler",)
    prediction = "flow_prediction"

    def __init__(
        self,
        *,
        times: Literal["logit_normal", "uniform"] = "logit_normal",
        mean: float = 0.0,
        deviation: float = 1.0,
        shift: float = 1.0,
        eval_times: list[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    ) -> None:
        """Define how times are drawn in training, and where they are dense in sampling.

        Args:
            times: distribution of the time t of a training sample in [0, 1]; 0 is data, 1 is noise.
            mean: mean of logit(t) where times is logit_normal (Esser et al. 2024, section 3.1).
            deviation: standard deviation of logit(t) where times is logit_normal.
            shift: times t of training and sampling become shift * t / (1 + (shift - 1) * t) (Esser et al. 2024, section
                5.3.2); above 1, there is more noise. Exports contain it.
            eval_times: times of the validation loss, which are not shifted.

        Raises:
            ValueError: a deviation or a shift that is not above 0, or times outside of [0, 1].
        """
        super().__init__()
        if deviation <= 0:
            raise ValueError(f"rectified_flow: deviation must be above 0, got {deviation}")
        if not 0 < shift < math.inf:
            raise ValueError(f"rectified_flow: shift must be above 0, got {shift}")
        if not eval_times or not all(0 <= t <= 1 for t in eval_times):
            raise ValueError(f"rectified_flow: eval_times {list(eval_times)}: give at least one, all in [0, 1]")
        self.times = times
        self.mean = mean
        self.deviation = deviation
        self.shift = shift
        self.eval_times = list(eval_times)

    def draw(self, x0: Tensor, draws: Draws = GLOBAL) -> tuple[Tensor, Tensor]:
        """Noise, and times (B,) float32 in [0, 1]. See `Objective.draw`."""
        noise = draws.normal_like(x0)
        if self.times == "uniform":
            times = draws.uniform(x0)
        else:
            times = torch.sigmoid(self.mean + self.deviation * draws.normal(x0))
        return noise, shift_times(times, self.shift)

    def forward(self, predict: Predict, x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The squared error of the velocity of each sample (B,), at times (B,) in [0, 1]. See `Objective.forward`."""
        t = times[:, None, None, None]  # (B, 1, 1, 1)
        prediction = predict((1 - t) * x0 + t * noise, TIME_SCALE * times)
        return (prediction.float() - (noise - x0).float()).square().mean(dim=(1, 2, 3))

    def for_diffusers(self) -> UniPCMultistepScheduler:
        """UniPC of order 1 without its corrector, which is Euler's method. See `Objective.for_diffusers`.

        `FlowMatchEulerDiscreteScheduler` lacks what `StableDiffusionPipeline` asks of a scheduler. UniPC's own times
        differ from `integrate`'s by up to 0.001; the pipeline's argument `sigmas` sets them. Where times are shifted,
        those that the network is given differ nevertheless, since UniPC rounds them.
        """
        return UniPCMultistepScheduler(
            # It rounds times down to integers, and begins 1e-6 below 1, whose time would become 999.
            num_train_timesteps=TIME_SCALE + 1,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=self.shift,
            solver_order=1,
            disable_corrector=list(range(TIME_SCALE)),
            steps_offset=1,  # unused with flow_sigmas; the pipeline warns about every other value
        )

    def integrate(self, predict: Predict, noise: Tensor, steps: int, sampler: str) -> Tensor:
        """Euler's method in steps from t = 1 to t = 0, which are equal but for the shift. See `Objective.integrate`."""
        latents = noise
        grid = shift_times(torch.linspace(1, 0, steps + 1, device=noise.device), self.shift)  # (steps + 1,)
        for t, following in zip(grid[:-1], grid[1:], strict=True):
            latents = latents + (following - t) * predict(latents, (TIME_SCALE * t).expand(len(latents)))
        return latents

    def save(self, folder: Path) -> None:
        """Write scheduler_config.json of a `FlowMatchEulerDiscreteScheduler`."""
        FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIME_SCALE, shift=self.shift).save_pretrained(str(folder))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """An objective for sampling.

        Raises:
            FileNotFoundError: no scheduler_config.json.
            ValueError: a damaged file; a scheduler whose times `integrate` does not support.
        """
        file = folder / "scheduler_config.json"
        saved = read_object(file)
        wanted = {"num_train_timesteps": TIME_SCALE, "use_dynamic_shifting": False}
        if any(saved.get(name) != value for name, value in wanted.items()):
            raise ValueError(f"{file}: rectified_flow has {TIME_SCALE} training timesteps and a fixed shift")
        shift = saved.get("shift")
        if not is_number(shift) or shift <= 0:
            raise ValueError(f"{file}: shift must be a number above 0, got {shift}")
        return cls(shift=shift)


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Times in [0, 1] of any shape, as s t / (1 + (s - 1) t) for the shift s (Esser et al. 2024, section 5.3.2).

    0 and 1 stay where they are. At the shifted time, an image of s^2 n pixels is as uncertain as one of n pixels that
    shows the same is at time t.
    """
    return shift * times / (1 + (shift - 1) * times)
