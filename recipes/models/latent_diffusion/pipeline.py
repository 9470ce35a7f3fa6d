"""An exported diffusion run put together for sampling: denoiser, scheduler, encoders and the null caption."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import UNet2DConditionModel

from data.image_grid import to_uint8
from data.manifest import NULL_TEXT, Manifest
from recipes.models.latent_diffusion.samplers import initial_noise, make_scheduler, sample
from recipes.models.latent_diffusion.unet import UNet
from recipes.models.sampling import Precision, SamplingProgress, autocast


@dataclass
class Pipeline:
    """Captions to pictures.

    Attributes:
        denoiser: a `recipes.models.latent_diffusion.unet.UNet` on `device`.
        scheduler_config: the forward process, as diffusers' schedulers take it.
        image_encoder: decodes latents.
        text_encoder: embeds captions.
        null_text: (L, D), 32-bit.
        manifest: of the training data.
        resolution: of training, in pixels.
    """

    denoiser: Any
    scheduler_config: dict[str, Any]
    image_encoder: Any
    text_encoder: Any
    null_text: Any
    manifest: Manifest
    resolution: int
    device: str
    precision: Precision

    def generate(
        self,
        captions: list[str],
        *,
        seeds: list[int],
        sampler: Literal["ddim", "dpm++"] = "dpm++",
        steps: int = 25,
        guidance: float = 3.0,
        batch: int = 16,
        resolution: int | None = None,
    ) -> np.ndarray:
        """One picture a caption: (N, H, W, 3) uint8. A picture depends on its caption and seed, not on its batch.

        Raises:
            ValueError: a resolution that the autoencoder's grid does not divide, a batch or steps below 1.
        """
        resolution = resolution or self.resolution
        levels = 2 ** (len(self.denoiser.network.config.block_out_channels) - 1)
        unit = self.manifest.downsample * levels
        if resolution % unit:
            raise ValueError(f"--resolution: {resolution} is no multiple of {unit} (autoencoder times U-Net levels)")
        if batch < 1 or steps < 1:
            raise ValueError(f"--batch and --steps must be at least 1, got {batch} and {steps}")
        text = self.text_encoder.encode(captions)
        noise = initial_noise(seeds, self.manifest.latent_shape(resolution))
        pictures, progress = [], SamplingProgress(len(captions))
        for start in range(0, len(captions), batch):
            part = slice(start, start + batch)
            with autocast(self.device, self.precision):
                latents = sample(
                    self.denoiser,
                    make_scheduler(sampler, self.scheduler_config),
                    noise[part].to(self.device),
                    text[part].to(self.device),
                    self.null_text.to(self.device),
                    steps,
                    guidance,
                )
            pictures.append(to_uint8(self.image_encoder.decode(latents)))
            progress.say(min(start + batch, len(captions)))
        return np.concatenate(pictures)


def load(
    folder: Path,
    network: Path,
    manifest: Manifest,
    encoders: tuple[Any, Any],
    place: str,
    precision: Precision,
) -> Pipeline:
    """Everything of an export folder; see `recipes.generation.exports.load_pipeline`.

    Args:
        folder: the export.
        network: folder of the network's weights in it.
        manifest: of the data that it was trained on.
        encoders: the picture encoder and the text encoder (None for tokens) that the manifest names.
        place: device.
        precision: of the network.
    """
    image_encoder, text_encoder = encoders
    # low_cpu_mem_usage needs a package that the lock does not have, and says so at length where it is left to choose.
    unet = UNet2DConditionModel.from_pretrained(
        str(network), use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
    )
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    return Pipeline(
        denoiser=UNet(unet).to(place).eval(),
        scheduler_config={key: value for key, value in scheduler.items() if not key.startswith("_")},
        image_encoder=image_encoder.to(place),
        text_encoder=text_encoder.to(place),
        null_text=torch.from_numpy(np.load(folder / NULL_TEXT, allow_pickle=False)).float(),
        manifest=manifest,
        resolution=record["resolution"],
        device=place,
        precision=precision,
    )
