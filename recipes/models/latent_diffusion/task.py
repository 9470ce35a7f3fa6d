"""Text-to-image latent diffusion as a training task: batch of latents and text in, losses out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn

from recipes.models.latent_diffusion.ddpm import DiffusionLoss, NoiseSchedule
from recipes.models.task import Task
from recipes.models.weights import load_safetensors


class LatentDiffusion(Task):
    """Latent diffusion (Rombach et al. 2022) over precomputed, normalised latents and text embeddings."""

    entry_points = ("denoise",)
    exports_average_beside = True

    def __init__(
        self,
        *,
        denoiser: Annotated[Any, "denoiser"],
        prediction: Literal["epsilon", "v_prediction"] = "epsilon",
        steps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear",
        min_snr_gamma: float | None = None,
        eval_timesteps: list[int] = (50, 250, 500, 750, 950),
    ) -> None:
        """Put the parts together.

        Args:
            denoiser: the network.
            prediction: what it predicts: the noise, or the velocity.
            steps: timesteps of the forward process.
            beta_start: variance added at the first step.
            beta_end: variance added at the last step.
            beta_schedule: spacing between the two; scaled_linear is linear in the square root.
            min_snr_gamma: clip of the min-SNR weight, for instance 5; null: every timestep weighs 1.
            eval_timesteps: timesteps of the validation loss.
        """
        super().__init__()
        if not eval_timesteps or not all(0 <= t < steps for t in eval_timesteps):
            raise ValueError(
                f"latent_diffusion: eval_timesteps {list(eval_timesteps)}: give at least one, all in [0, {steps})"
            )
        self.denoiser = denoiser
        self.loss = DiffusionLoss(NoiseSchedule(steps, beta_start, beta_end, beta_schedule), prediction, min_snr_gamma)
        self.eval_timesteps = list(eval_timesteps)
        self.eval_names = ["loss", *(f"loss_t{t}" for t in eval_timesteps)]

    def blocks(self) -> list[nn.Module]:
        """The denoiser's."""
        return self.denoiser.blocks()

    def recomputed_blocks(self) -> list[nn.Module]:
        """The denoiser's."""
        return self.denoiser.recomputed_blocks()

    def denoise(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """The denoiser's prediction, for sampling while the model is sharded.

        Args:
            latents: (B, C, H, W), noisy.
            timesteps: (B,), int64.
            text: (B, L, D).

        Returns:
            (B, C, H, W).
        """
        return self.denoiser(latents, timesteps, text)

    def requirements(self) -> dict[str, int]:
        """What the manifest of its training data must say."""
        return {"channels": self.denoiser.latent_channels, "text_width": self.denoiser.text_width}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss, at timesteps and noise drawn from the device's generator.

        Args:
            batch: `latents` (B, C, H, W) 32-bit normalised, `text` (B, L, D).

        Returns:
            `total`: scalar.
        """
        x0 = batch["latents"]
        noise = torch.randn_like(x0)
        timesteps = torch.randint(self.loss.schedule.steps, (len(x0),), device=x0.device)
        losses = self.loss(lambda x, t: self.denoiser(x, t, batch["text"]), x0, noise, timesteps)
        return {"total": losses.mean()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss of each sample at fixed timesteps, its noise fixed by the sample: comparable between checkpoints.

        Args:
            batch: as in `forward`, and `seed` (B,) int64, which fixes a sample's noise whatever batch or rank it is in.

        Returns:
            `loss_t<timestep>` and their mean `loss`: (B,) each.
        """
        x0 = batch["latents"]
        noise = torch.stack([_noise(int(seed), x0.shape[1:]) for seed in batch["seed"]]).to(x0.device)
        losses = {}
        for t in self.eval_timesteps:
            timesteps = torch.full((len(x0),), t, device=x0.device)
            losses[f"loss_t{t}"] = self.loss(lambda x, s: self.denoiser(x, s, batch["text"]), x0, noise, timesteps)
        return {"loss": torch.stack(list(losses.values())).mean(0), **losses}

    def scheduler_config(self) -> dict[str, Any]:
        """Arguments of diffusers' schedulers for sampling from this model."""
        return {
            **self.loss.schedule.config,
            "prediction_type": self.loss.prediction,
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
        }

    def export(self, folder: Path) -> None:
        """Write unet/ and scheduler/ as diffusers' `from_pretrained` opens them."""
        self.denoiser.save(str(folder / "unet"))
        DDIMScheduler(**self.scheduler_config()).save_pretrained(str(folder / "scheduler"))

    def export_average(self, folder: Path) -> None:
        """Write unet_ema/ beside unet/; to be called while the averaged weights are in place."""
        self.denoiser.save(str(folder / "unet_ema"))

    def load_export(self, folder: Path) -> None:
        """Take the weights of an exported folder, strictly.

        Raises:
            ValueError: the folder has other tensors than this model.
        """
        load_safetensors(self.denoiser.network, folder / "unet" / "diffusion_pytorch_model.safetensors")


def _noise(seed: int, shape: torch.Size) -> Tensor:
    # On the CPU and a sample at a time, so that device, batch size and rank leave the noise as it is.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
