"""Noise schedule and diffusion loss, apart from any network and any sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn

Prediction = Literal["epsilon", "v_prediction"]


class NoiseSchedule(nn.Module):
    """The forward process x_t = alpha_t x_0 + sigma_t noise of DDPM (Ho et al. 2020), with diffusers' tables.

    Args:
        steps: number of timesteps.
        beta_start: variance added at the first step.
        beta_end: variance added at the last step.
        beta_schedule: spacing between the two, by diffusers' names.
    """

    def __init__(self, steps: int, beta_start: float, beta_end: float, beta_schedule: str) -> None:
        super().__init__()
        scheduler = DDPMScheduler(steps, beta_start=beta_start, beta_end=beta_end, beta_schedule=beta_schedule)
        self.steps = steps
        self.config = {
            "num_train_timesteps": steps,
            "beta_start": beta_start,
            "beta_end": beta_end,
            "beta_schedule": beta_schedule,
        }
        # Not in checkpoints: a function of the recipe. Kept in 32-bit whatever the model's dtype.
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


class DiffusionLoss(nn.Module):
    """Mean squared error of the predicted noise or velocity, one value a sample.

    Args:
        schedule: the forward process.
        prediction: what the network predicts.
        min_snr_gamma: weight every sample by min(snr, gamma) in terms of x_0 (Hang et al. 2023, section 3.4); None: 1.
    """

    def __init__(self, schedule: NoiseSchedule, prediction: Prediction, min_snr_gamma: float | None = None) -> None:
        super().__init__()
        if min_snr_gamma is not None and min_snr_gamma <= 0:
            raise ValueError(f"min_snr_gamma must be above 0, got {min_snr_gamma}")
        self.schedule = schedule
        self.prediction = prediction
        self.min_snr_gamma = min_snr_gamma

    def forward(
        self, denoise: Callable[[Tensor, Tensor], Tensor], x0: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        """The weighted squared error of each sample.

        Args:
            denoise: (x_t (B, C, H, W), timesteps (B,)) -> prediction (B, C, H, W).
            x0: (B, C, H, W), clean latents in 32-bit.
            noise: (B, C, H, W), standard normal.
            timesteps: (B,), int64.

        Returns:
            (B,), 32-bit.
        """
        prediction = denoise(self.schedule.add_noise(x0, noise, timesteps), timesteps)
        target = noise if self.prediction == "epsilon" else self.schedule.velocity(x0, noise, timesteps)
        error = (prediction.float() - target.float()).square().mean(dim=(1, 2, 3))  # (B,)
        return error * self.weight(timesteps)

    def weight(self, timesteps: Tensor) -> Tensor:
        """(B,): 1, or the min-SNR weight carried from x_0's error to that of the prediction."""
        if self.min_snr_gamma is None:
            return torch.ones_like(timesteps, dtype=torch.float32)
        snr = self.schedule.snr(timesteps)
        clipped = snr.clamp(max=self.min_snr_gamma)
        # An error in epsilon is snr times smaller than the one in x_0, an error in v snr + 1 times.
        return clipped / (snr if self.prediction == "epsilon" else snr + 1)
