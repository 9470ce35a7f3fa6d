"""Deterministic samplers with classifier-free guidance, on diffusers' schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

Sampler = Literal["ddim", "dpm++"]
Denoise = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_scheduler(sampler: Sampler, config: Mapping[str, Any]) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """The scheduler of a sampler for a model's forward process.

    Args:
        sampler: ddim (Song et al. 2021, eta 0) or dpm++ (DPM-Solver++ 2M, Lu et al. 2022).
        config: num_train_timesteps, beta_start, beta_end, beta_schedule, prediction_type, ...
    """
    if sampler == "ddim":
        return DDIMScheduler.from_config(dict(config))
    if sampler == "dpm++":
        # From the last timestep on, whatever spacing a saved DDIM config names: its own would start short of the noise.
        solver = {"algorithm_type": "dpmsolver++", "solver_order": 2, "timestep_spacing": "linspace"}
        return DPMSolverMultistepScheduler.from_config(dict(config), **solver)
    raise ValueError(f"unknown sampler `{sampler}`; allowed: ddim, dpm++")


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> Tensor:
    """Standard normal noise (B, C, H, W), one CPU generator a seed: the same in any batch, on any device."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@torch.no_grad()
def sample(
    denoise: Denoise,
    scheduler: DDIMScheduler | DPMSolverMultistepScheduler,
    noise: Tensor,
    text: Tensor,
    null_text: Tensor,
    steps: int,
    guidance: float,
) -> Tensor:
    """Latents from noise, guided by text (Ho and Salimans 2022: null + guidance * (text - null)).

    Args:
        denoise: (latents (B, C, H, W), timesteps (B,), text (B, L, D)) -> (B, C, H, W).
        scheduler: from `make_scheduler`.
        noise: (B, C, H, W), standard normal.
        text: (B, L, D).
        null_text: (L, D), the embedding of the empty caption that training dropped captions to.
        steps: network evaluations (each of twice the batch when guided).
        guidance: 1 leaves the text's own prediction.

    Returns:
        (B, C, H, W), normalised latents.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    scheduler.set_timesteps(steps, device=noise.device)
    latents = noise * scheduler.init_noise_sigma
    guided = guidance != 1.0
    both = torch.cat([null_text.expand_as(text), text]) if guided else text
    for timestep in scheduler.timesteps:
        x = torch.cat([latents, latents]) if guided else latents
        prediction = denoise(scheduler.scale_model_input(x, timestep), timestep.expand(len(x)), both).float()
        if guided:
            null, conditioned = prediction.chunk(2)
            prediction = null + guidance * (conditioned - null)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents
