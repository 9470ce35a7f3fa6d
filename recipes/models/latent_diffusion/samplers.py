"""Deterministic samplers of denoising diffusion, on diffusers' schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

from recipes.models.latent_diffusion.objective import Predict

# log(alpha / sigma) from which dpm++ starts in the cosine schedule, as in its authors' code.
LEAST_LOG_SNR = -5.1


def make_scheduler(sampler: str, config: Mapping[str, Any]) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """The scheduler of a sampler for a model's forward process.

    Args:
        sampler: ddim (Song et al. 2021, eta 0) or dpm++ (DPM-Solver++ 2M, Lu et al. 2022).
        config: num_train_timesteps, beta_start, beta_end, beta_schedule, prediction_type, ...
    """
    if sampler == "ddim":
        return DDIMScheduler.from_config(dict(config))
    assert sampler == "dpm++"
    # From the last timestep on, whatever spacing a saved DDIM config names: its own would start short of the noise.
    solver = {"algorithm_type": "dpmsolver++", "solver_order": 2, "timestep_spacing": "linspace"}
    if config.get("beta_schedule") == "squaredcos_cap_v2":
        # Of the last timesteps' latents, less than 1% is the image: errors of the network are divided by that.
        solver["lambda_min_clipped"] = LEAST_LOG_SNR
    return DPMSolverMultistepScheduler.from_config(dict(config), **solver)


def integrate(
    predict: Predict, scheduler: DDIMScheduler | DPMSolverMultistepScheduler, noise: Tensor, steps: int
) -> Tensor:
    """Latents from noise, by the steps of a scheduler.

    Args:
        predict: the network with its text and guidance.
        scheduler: from `make_scheduler`.
        noise: (B, C, H, W), standard normal.
        steps: network evaluations.

    Returns:
        (B, C, H, W), normalised latents.

    Raises:
        ValueError: see `set_steps`.
    """
    set_steps(scheduler, steps)
    latents = noise  # neither scheduler scales it, nor what the network is given
    for timestep in scheduler.timesteps:
        times = torch.full((len(latents),), int(timestep), device=latents.device)
        latents = scheduler.step(predict(latents, times), timestep, latents, return_dict=False)[0]
    return latents


def set_steps(scheduler: DDIMScheduler | DPMSolverMultistepScheduler, steps: int) -> None:
    """Lets a scheduler take this many steps.

    Raises:
        ValueError: as many steps as the forward process has timesteps, or more; two steps of dpm++ would share a
            timestep; or ddim would begin far from the noise, without more than a tenth of the timesteps, and two steps,
            or with one step.
    """
    # Two steps would share a timestep, by whose distance dpm++ divides, and ddim would look beyond the last one.
    timesteps = scheduler.config.num_train_timesteps
    if steps >= timesteps:
        raise ValueError(f"steps must be below the {timesteps} timesteps of the forward process, got {steps}")
    scheduler.set_timesteps(steps)  # on the host, which would wait for the device in each step to look at them
    # Steps of ddim are whole numbers of timesteps, so those of a number of steps that does not divide the timesteps end
    # short of the last one: 600 of 1,000 begin at timestep 600, where 40% of the latents should be the image.
    first, stride = int(scheduler.timesteps[0]), timesteps // steps
    # In the cosine schedule dpm++ begins before the last timestep, at LEAST_LOG_SNR, so that it has fewer of them.
    if len(scheduler.timesteps.unique()) < steps:
        raise ValueError(f"steps: {steps} steps of dpm++ begin at timestep {first}; give {first} or fewer")
    if isinstance(scheduler, DDIMScheduler) and steps == 1 and first < timesteps // 2:
        raise ValueError(
            f"steps: 1 step of ddim begins at timestep {first} of {timesteps}, short of the noise; give 2 or more, or "
            "take the sampler dpm++"
        )
    if isinstance(scheduler, DDIMScheduler) and timesteps - first > max(timesteps // 10, 2 * stride):
        raise ValueError(
            f"steps: {steps} steps of ddim begin at timestep {first} of {timesteps}, short of the noise; "
            f"give {timesteps // (stride + 1)}, or take the sampler dpm++"
        )
