"""Denoising diffusion (DDPM, Ho et al. 2020): forward process, training loss, and its samplers' configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor, nn

from data.random_numbers import Draws
from recipes.models.config_files import LARGEST, build_from
from recipes.models.latent_diffusion.objective import GLOBAL, Objective, Predict
from recipes.models.latent_diffusion.samplers import integrate, make_scheduler, set_steps

NOISE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")  # of diffusers' schedulers


class DDPM(Objective):
    """Denoising diffusion (Ho et al. 2020): mean squared error of the predicted noise or velocity."""

    name = "ddpm"
    samplers = ("dpm++", "ddim")

    def __init__(
        self,
        *,
        prediction: Literal["epsilon", "v_prediction"] = "epsilon",
        steps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear",
        min_snr_gamma: float | None = None,
        eval_timesteps: list[int] = (50, 250, 500, 750, 950),
    ) -> None:
        """Build the tables of the forward process.

        Args:
            prediction: what the network predicts: the noise, or the velocity (Salimans and Ho 2022).
            steps: number of timesteps of the forward process, up to 10,000.
            beta_start: variance added at the first timestep.
            beta_end: variance added at the last timestep.
            beta_schedule: spacing between the two; scaled_linear is linear in the square root.
            min_snr_gamma: clip of the min-SNR weight, for instance 5; null: every timestep has weight 1.
            eval_timesteps: timesteps of the validation loss.

        Raises:
            ValueError: a clip that is not above 0, too many timesteps, or ones that do not exist.
        """
        super().__init__()
        if min_snr_gamma is not None and min_snr_gamma <= 0:
            raise ValueError(f"min_snr_gamma must be above 0, got {min_snr_gamma}")
        if steps > LARGEST:
            raise ValueError(f"ddpm: steps {steps}: give {LARGEST} or fewer; an export with more could not be opened")
        if not eval_timesteps or not all(0 <= t < steps for t in eval_timesteps):
            raise ValueError(f"ddpm: eval_timesteps {list(eval_timesteps)}: give at least one, all in [0, {steps})")
        self.prediction = prediction
        self.min_snr_gamma = min_snr_gamma
        self.eval_times = list(eval_timesteps)
        self.schedule = NoiseSchedule(steps, beta_start, beta_end, beta_schedule)
        # Arguments of diffusers' schedulers.
        self.scheduler_config: dict[str, Any] = {
            "num_train_timesteps": steps,
            "beta_start": beta_start,
            "beta_end": beta_end,
            "beta_schedule": beta_schedule,
            "prediction_type": prediction,
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
        }

    def draw(self, x0: Tensor, draws: Draws = GLOBAL) -> tuple[Tensor, Tensor]:
        """Noise, and timesteps (B,) int64 that are uniform in [0, steps). See `Objective.draw`."""
        noise = draws.normal_like(x0)
        return noise, draws.integers(x0, self.schedule.steps)

    def forward(self, predict: Predict, x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The weighted squared error of each sample (B,), at timesteps (B,) int64. See `Objective.forward`."""
        prediction = predict(self.schedule.add_noise(x0, noise, times), times)
        target = noise if self.prediction == "epsilon" else self.schedule.velocity(x0, noise, times)
        error = (prediction.float() - target.float()).square().mean(dim=(1, 2, 3))  # (B,)
        return error * self.weight(times)

    def weight(self, timesteps: Tensor) -> Tensor:
        """(B,): 1, or min(snr, gamma) in terms of the error of x_0 (Hang et al. 2023, section 3.4)."""
        if self.min_snr_gamma is None:
            return torch.ones_like(timesteps, dtype=torch.float32)
        snr = self.schedule.snr(timesteps)
        clipped = snr.clamp(max=self.min_snr_gamma)
        # An error in epsilon is snr times smaller than the one in x_0, an error in v snr + 1 times.
        return clipped / (snr if self.prediction == "epsilon" else snr + 1)

    def for_diffusers(self) -> Any:
        """DPM-Solver++ with the steps of the sampler dpm++. See `Objective.for_diffusers`."""
        return make_scheduler(self.samplers[0], self.scheduler_config)

    def other_noise(self, scheduler: dict[str, Any]) -> list[str]:
        """Fields that change the noise of a timestep. See `Objective.other_noise`."""
        own = {name: self.scheduler_config[name] for name in NOISE}
        own |= {"trained_betas": None, "rescale_betas_zero_snr": False}
        if own["beta_schedule"] == "squaredcos_cap_v2":  # it has no such variances, whatever a file says
            del own["beta_start"], own["beta_end"]
        return [
            f"{name} is {scheduler[name]!r:.60} instead of {value!r}"
            for name, value in own.items()
            if scheduler.get(name, value) != value
        ]

    def check_steps(self, steps: int, sampler: str) -> None:
        """See `Objective.check_steps`."""
        super().check_steps(steps, sampler)
        set_steps(make_scheduler(sampler, self.scheduler_config), steps)

    def integrate(self, predict: Predict, noise: Tensor, steps: int, sampler: str) -> Tensor:
        """See `Objective.integrate`."""
        return integrate(predict, make_scheduler(sampler, self.scheduler_config), noise, steps)

    def save(self, folder: Path) -> None:
        """Write scheduler_config.json of a `DDIMScheduler`."""
        DDIMScheduler(**self.scheduler_config).save_pretrained(str(folder))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """An objective for sampling from the scheduler_config.json of a `DDIMScheduler`, which is kept as it is. Errors
        as of `recipes.models.config_files.build_from`."""
        return build_from(folder / "scheduler_config.json", cls._from_scheduler)

    @classmethod
    def _from_scheduler(cls, saved: dict[str, Any]) -> Self:
        names = {"num_train_timesteps": "steps", "prediction_type": "prediction"}
        names |= {name: name for name in ("beta_start", "beta_end", "beta_schedule")}
        objective = cls(**{own: saved[name] for name, own in names.items()}, eval_timesteps=[0])
        objective.scheduler_config = {name: value for name, value in saved.items() if not name.startswith("_")}
        make_scheduler(cls.samplers[0], objective.scheduler_config)  # its mistakes are known now, not when it samples
        return objective


class NoiseSchedule(nn.Module):
    """The forward process x_t = alpha_t x_0 + sigma_t noise of DDPM (Ho et al. 2020), with diffusers' tables.

    Args:
        steps: number of timesteps.
        beta_start: variance added at the first timestep.
        beta_end: variance added at the last timestep.
        beta_schedule: spacing between the two, by diffusers' names.
    """

    def __init__(self, steps: int, beta_start: float, beta_end: float, beta_schedule: str) -> None:
        super().__init__()
        scheduler = DDPMScheduler(steps, beta_start=beta_start, beta_end=beta_end, beta_schedule=beta_schedule)
        self.steps = steps
        # Not in checkpoints: a function of the recipe. Kept in float32 whatever the model's dtype.
        self.register_buffer("alpha", scheduler.alphas_cumprod.sqrt(), persistent=False)
        self.register_buffer("sigma", (1 - scheduler.alphas_cumprod).sqrt(), persistent=False)

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t of shape (B, C, H, W) for x0 and noise of that shape and timesteps (B,)."""
        alpha, sigma = self.alpha[timesteps, None, None, None], self.sigma[timesteps, None, None, None]
        return alpha * x0 + sigma * noise

    def velocity(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v = alpha_t noise - sigma_t x_0 (Salimans and Ho 2022, appendix D)."""
        alpha, sigma = self.alpha[timesteps, None, None, None], self.sigma[timesteps, None, None, None]
        return alpha * noise - sigma * x0

    def snr(self, timesteps: Tensor) -> Tensor:
        """Signal-to-noise ratio alpha_t^2 / sigma_t^2, (B,)."""
        return (self.alpha[timesteps] / self.sigma[timesteps]).square()
