"""Components for benchmarks only: what an ordinary training run has in place of the levers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from composer.algorithms.ema.ema import EMAParameters, compute_ema

from data.aliases import InputPath
from data.latents import latents
from data.loading import Batch, Loading, Placement
from recipes.config import components
from recipes.encoders.base import ImageEncoder, TextEncoder
from recipes.training.callback import Callback
from recipes.training.lever import Lever
from recipes.training.run import Run

COMPONENTS = {
    "data": {"encoded_in_loop": "benchmarks.common.baseline:encoded_in_loop"},
    "algorithm": {"composer_ema": "benchmarks.common.baseline:ComposerEMA"},
}


def register() -> None:
    """Add them to the components of this process."""
    for group, names in COMPONENTS.items():
        components.COMPONENTS[group].update(names)


def encoded_in_loop(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    streams: dict[str, Annotated[Any, "stream"]],
    resolution: int,
    pictures: InputPath,
    image_encoder: Annotated[Any, "image_encoder"],
    text_encoder: Annotated[Any, "text_encoder"],
    caption_dropout: float = 0.0,
    workers: int = 2,
) -> Loading:
    """The samples of an encoded set, in the order of `data.latents.latents`, encoded again in every step.

    Pixels and tokens are read from memory, so that the benchmark measures the encoders and not a JPEG decoder.

    Args:
        streams: the encoded set, which gives the order of the samples and the embedding of the empty caption.
        resolution: side of the images in pixels.
        pictures: folder of the images, written by `benchmarks.common.latent_sets.write_set`.
        image_encoder: encodes the pixels of each microbatch.
        text_encoder: encodes the tokens of each microbatch.
        caption_dropout: as in `latents`.
        workers: as in `latents`.
    """
    loading = latents(
        placement,
        requirements,
        streams=streams,
        resolution=resolution,
        caption_dropout=caption_dropout,
        workers=workers,
    )
    loading.loader.collate_fn = PixelBatches(loading.loader.collate_fn, Path(pictures), resolution)
    return dataclasses.replace(loading, on_device=InLoop(image_encoder, text_encoder, loading.on_device))


class PixelBatches:
    """Collates the numbers of samples into `pixels` uint8 (B, 3, R, R), `tokens` int64 (B, L) and `seed` (B,)."""

    def __init__(self, read: Callable[[Sequence[int]], Batch], folder: Path, resolution: int) -> None:
        self.read = read
        self.pixels = np.load(folder / f"{resolution}.npy", mmap_mode="r")
        self.tokens = np.load(folder / "tokens.npy")
        self.rows = {seed: row for row, seed in enumerate(np.load(folder / "seeds.npy").tolist())}

    def __call__(self, numbers: Sequence[int]) -> Batch:
        seed = self.read(numbers)["seed"].clone()  # the next batches reuse the memory
        rows = [self.rows[key] for key in seed.tolist()]
        return {
            "pixels": torch.from_numpy(self.pixels[rows]),
            "tokens": torch.from_numpy(self.tokens[rows]),
            "seed": seed,
        }


class InLoop:
    """Encodes a batch on its device, then calls `then` with it, as with a batch of latents."""

    def __init__(self, image_encoder: ImageEncoder, text_encoder: TextEncoder, then: Callable[[Batch], Batch]) -> None:
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder
        self.then = then

    def __call__(self, batch: Batch) -> Batch:
        device = batch["pixels"].device
        for encoder in (self.image_encoder, self.text_encoder):
            if encoder.device != device:
                encoder.to(device)
        pixels = batch["pixels"].contiguous(memory_format=torch.channels_last)
        # Stored latents are contiguous, and random numbers are drawn in memory order.
        mean, std = (moment.contiguous() for moment in self.image_encoder.encode(pixels))
        text = self.text_encoder.encode_tokens(batch["tokens"])
        return self.then({"mean": mean, "std": std, "text": text, "seed": batch["seed"]})


class ComposerEMA(Lever):
    """Composer's exponential moving average of the weights, updated after every batch."""

    def __init__(self, *, decay: float = 0.9999) -> None:
        """
        Args:
            decay: factor of the old average in an update.
        """
        self.decay = decay
        self.average: EMAParameters | None = None

    def begin(self, run: Run) -> None:
        self.average = EMAParameters(run.module)

    def step_end(self, run: Run) -> None:
        compute_ema(run.module, self.average, self.decay)


class LossRecord(Callback):
    """Appends the training loss of every batch to a list."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def step_end(self, run: Run) -> None:
        self.values.append(float(run.loss))
