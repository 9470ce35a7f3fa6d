"""An exported run put together for sampling: denoiser, scheduler, encoders and the null caption."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.manifest import NULL_TEXT, Manifest

Precision = Literal["fp32", "bf16", "fp16"]
Weights = Literal["ema", "raw"]


def find_export(path: Path) -> Path:
    """The export folder that `path` is, or that lies in it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: `path` is a file, which would have to be unpickled.
    """
    if path.is_file():
        raise ValueError(
            f"{path} is a file; a Composer checkpoint can run code when it is read, so only export folders are: "
            f"give {path.parent.parent / 'export'}, which the export callback writes"
        )
    for folder in (path, path / "export"):
        if (folder / "unet" / "config.json").is_file():
            return folder
    raise FileNotFoundError(f"{path}: no exported run (a folder with unet/config.json); give runs/<run_name>/export")


def find_denoiser(export: Path, weights: Weights | None) -> Path:
    """The folder of the denoiser in an export.

    Args:
        export: as `find_export` gives it.
        weights: averaged or as trained; None: averaged where there are any.

    Raises:
        FileNotFoundError: averaged weights are asked for, and the run had no average.
    """
    averaged = export / "unet_ema"
    there = (averaged / "config.json").is_file()
    if weights == "ema" and not there:
        raise FileNotFoundError(f"--weights ema: {averaged} does not exist, the run had no average; use raw")
    return averaged if there and weights != "raw" else export / "unet"


@dataclass
class Pipeline:
    """Captions to pictures.

    Attributes:
        denoiser: a `recipes.models.unet.UNet` on `device`.
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
        import torch

        from callbacks.pictures import to_uint8
        from recipes.models.samplers import initial_noise, make_scheduler, sample

        resolution = resolution or self.resolution
        levels = 2 ** (len(self.denoiser.network.config.block_out_channels) - 1)
        unit = self.manifest.downsample * levels
        if resolution % unit:
            raise ValueError(f"--resolution: {resolution} is no multiple of {unit} (autoencoder times U-Net levels)")
        if batch < 1 or steps < 1:
            raise ValueError(f"--batch and --steps must be at least 1, got {batch} and {steps}")
        text = self.text_encoder.encode(captions)
        noise = initial_noise(seeds, self.manifest.latent_shape(resolution))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        pictures, began = [], time.monotonic()
        for start in range(0, len(captions), batch):
            part = slice(start, start + batch)
            with torch.autocast(self.device, dtype, enabled=dtype != torch.float32):
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
            done = min(start + batch, len(captions))
            rate = done / (time.monotonic() - began)
            left = (len(captions) - done) / rate
            print(f"generate: {done}/{len(captions)} pictures, {rate:.1f}/s, {left:.0f} s left", file=sys.stderr)
        return np.concatenate(pictures)


def load_pipeline(
    folder: Path, device: Literal["auto", "cpu", "gpu"], precision: Precision, weights: Weights | None = None
) -> Pipeline:
    """Everything of an export folder; reads JSON, NumPy arrays and safetensors only.

    Args:
        folder: as `find_export` gives it.
        device: auto: a GPU where there is one.
        precision: of the denoiser.
        weights: as `find_denoiser` takes them.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: no GPU where one is asked for, an encoder other than the one that encoded the training data.
    """
    import torch
    from diffusers import UNet2DConditionModel

    from recipes.build import encoders_of
    from recipes.models.unet import UNet

    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("--device gpu: PyTorch sees no GPU; use auto or cpu")
    place = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    manifest = Manifest.read(folder)
    image_encoder, text_encoder = encoders_of(manifest, folder)
    # low_cpu_mem_usage needs a package that the lock does not have, and says so at length where it is left to choose.
    network = UNet2DConditionModel.from_pretrained(
        str(find_denoiser(folder, weights)), use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
    )
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    return Pipeline(
        denoiser=UNet(network).to(place).eval(),
        scheduler_config={key: value for key, value in scheduler.items() if not key.startswith("_")},
        image_encoder=image_encoder.to(place),
        text_encoder=text_encoder.to(place),
        null_text=torch.from_numpy(np.load(folder / NULL_TEXT, allow_pickle=False)).float(),
        manifest=manifest,
        resolution=record["resolution"],
        device=place,
        precision=precision,
    )
