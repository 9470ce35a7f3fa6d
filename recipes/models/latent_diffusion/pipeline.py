"""An exported diffusion run put together for sampling: denoiser, objective, encoders and the null caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.encoded.manifest import NULL_TEXT, Manifest
from data.image_grid import to_uint8
from data.system.arrays import read_matrix
from recipes.models.family import ExportParts
from recipes.models.latent_diffusion.denoiser import Denoiser
from recipes.models.latent_diffusion.objective import Objective, seeded_noise
from recipes.models.latent_diffusion.task import SCHEDULER
from recipes.models.sampling import Precision, SamplingProgress, autocast, check_finite, check_guidance


@dataclass
class DiffusionPipeline:
    """Captions to images.

    Attributes:
        denoiser: the network, on `device`.
        objective: how latents are sampled from it.
        image_encoder: decodes latents.
        text_encoder: embeds captions.
        null_text: (L, D), float32, the embedding of the empty caption.
        manifest: the manifest of the training data.
        resolution: side of the training images in pixels.
        device: cpu or cuda.
        precision: of the denoiser.
    """

    denoiser: Denoiser
    objective: Objective
    image_encoder: Any
    text_encoder: Any
    null_text: Tensor
    manifest: Manifest
    resolution: int
    device: str
    precision: Precision

    def generate(
        self,
        captions: list[str],
        *,
        seeds: list[int],
        sampler: str | None = None,
        steps: int = 25,
        guidance: float = 3.0,
        batch: int = 16,
        resolution: int | None = None,
    ) -> np.ndarray:
        """One image per caption: (N, H, W, 3) uint8. An image depends on its caption and seed, not on its batch.

        Args:
            captions: N.
            seeds: N, one per image.
            sampler: one of the objective's samplers; None: its default.
            steps: network evaluations per image.
            guidance: weight of classifier-free guidance; 1 for none.
            batch: images sampled at once.
            resolution: side of the images in pixels; None: that of training.

        Raises:
            ValueError: an unknown sampler, a batch or steps below 1, a guidance that is NaN or too large, a resolution
                that does not fit the denoiser, or latents that are not finite, such as of a denoiser that overflows.
        """
        resolution = self.resolution if resolution is None else resolution
        unit = self.manifest.downsample * self.denoiser.grid_multiple
        if resolution < 1 or resolution % unit:
            raise ValueError(
                f"--resolution: {resolution} is not a positive multiple of {unit} "
                f"({self.manifest.downsample} pixels per latent, {self.denoiser.grid_multiple} latents of the denoiser)"
            )
        if batch < 1 or steps < 1:
            raise ValueError(f"--batch and --steps must be at least 1, got {batch} and {steps}")
        check_guidance(guidance)
        self.objective.check_sampler(sampler)
        shape = self.manifest.latent_shape(resolution)
        images, progress = [], SamplingProgress(len(captions))
        for start in range(0, len(captions), batch):
            part = slice(start, start + batch)
            text = self.text_encoder.encode(captions[part])
            with autocast(self.device, self.precision):
                latents = self.objective.sample(
                    self.denoiser,
                    seeded_noise(seeds[part], shape).to(self.device),
                    text.to(self.device),
                    self.null_text.to(self.device),
                    steps,
                    guidance,
                    sampler=sampler,
                )
            check_finite(latents.isfinite().flatten(1).all(1), self.precision)
            images.append(to_uint8(self.image_encoder.decode(latents)))
            progress.say(min(start + batch, len(captions)))
        return np.concatenate(images)

    def lost_tokens(self, captions: list[str]) -> list[int]:
        """How many tokens at the end of each caption are cut, because the text encoder does not take as many."""
        return self.text_encoder.lost_tokens(captions)


def load(parts: ExportParts) -> DiffusionPipeline:
    """The pipeline of an export. See `recipes.generation.exports.load_pipeline`."""
    # Exports from before export.json named them have a U-Net and DDPM's scheduler.
    denoiser = parts.component_class("denoiser", parts.record.get("denoiser", "unet"))
    objective = parts.component_class("objective", parts.record.get("objective", "ddpm"))
    null_text = read_matrix(parts.folder / NULL_TEXT, parts.manifest.text_shape)
    return DiffusionPipeline(
        denoiser=denoiser.open(parts.network).to(parts.device).eval(),
        objective=objective.open(parts.folder / SCHEDULER).to(parts.device),
        image_encoder=parts.image_encoder.to(parts.device),
        text_encoder=parts.text_encoder.to(parts.device),
        null_text=torch.from_numpy(null_text).float(),
        manifest=parts.manifest,
        resolution=parts.record["resolution"],
        device=parts.device,
        precision=parts.precision,
    )
