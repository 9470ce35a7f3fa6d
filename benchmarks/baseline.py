"""What a plain training of latent diffusion has in place of the levers; components of benchmarks.levers' recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from composer.algorithms import EMA

from data.aliases import InputPath  # noqa: F401 - read from the annotations below
from data.loading import Batch, Loading, Placement
from data.streaming import latents
from precompute.encoders.base import ImageEncoder, TextEncoder

COMPONENTS = {
    "data": {"encoded_in_loop": "benchmarks.baseline:encoded_in_loop"},
    "algorithm": {"composer_ema": "benchmarks.baseline:composer_ema"},
}


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
    """The samples of an encoded set, in the order of `data.streaming.latents`, encoded anew in every step.

    Pictures and tokens lie ready in memory, so that what is measured is the encoders' work and not a JPEG decoder's.

    Args:
        streams: the encoded set, for its order and its null caption.
        resolution: side of the pictures in pixels.
        pictures: folder that `benchmarks.latent_sets.write_set` made.
        image_encoder: encodes the pixels of each (micro)batch.
        text_encoder: encodes its tokens.
        caption_dropout: as of `latents`.
        workers: as of `latents`.
    """
    loading = latents(
        placement,
        requirements,
        streams=streams,
        resolution=resolution,
        caption_dropout=caption_dropout,
        workers=workers,
    )
    loading.loader.collate_fn = Pictures(loading.loader.collate_fn, Path(pictures), resolution)
    return dataclasses.replace(loading, on_device=InLoop(image_encoder, text_encoder, loading.on_device))


class Pictures:
    """From samples' numbers to `pixels` uint8 (B, 3, R, R), `tokens` int64 (B, L) and `seed` (B,)."""

    def __init__(self, read: Callable[[Sequence[int]], Batch], folder: Path, resolution: int) -> None:
        self.read = read
        self.pixels = np.load(folder / f"{resolution}.npy", mmap_mode="r")
        self.tokens = np.load(folder / "tokens.npy")
        self.rows = {seed: row for row, seed in enumerate(np.load(folder / "seeds.npy").tolist())}

    def __call__(self, numbers: Sequence[int]) -> Batch:
        seed = self.read(numbers)["seed"].clone()  # out of the memory that the next batches use again
        rows = [self.rows[key] for key in seed.tolist()]
        return {
            "pixels": torch.from_numpy(self.pixels[rows]),
            "tokens": torch.from_numpy(self.tokens[rows]),
            "seed": seed,
        }


class InLoop:
    """Encodes a batch on its device, then goes on as with a batch of latents."""

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
        # In the order of memory in which stored latents come: random numbers are drawn in it.
        mean, std = (moment.contiguous() for moment in self.image_encoder.encode(pixels))
        text = self.text_encoder.encode_tokens(batch["tokens"])
        return self.then({"mean": mean, "std": std, "text": text, "seed": batch["seed"]})


def composer_ema(*, decay: float = 0.9999) -> EMA:
    """Composer's moving average, updated after every batch from the first on.

    Args:
        decay: share of the average that an update keeps.
    """
    return EMA(half_life=None, smoothing=decay, update_interval="1ba")
