"""Components of the benchmarks' recipes alone: what a plain training has in place of the levers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from composer import Callback, Logger, State
from composer.algorithms.ema.ema import EMAParameters, compute_ema
from torch import Tensor, nn

from data.aliases import InputPath  # noqa: F401 - read from the annotations below
from data.latents import latents
from data.loading import Batch, Loading, Placement
from recipes.algorithms.modules.low_precision_norms import lower_norms
from recipes.config import components
from recipes.encoders.base import ImageEncoder, TextEncoder
from recipes.training.lever import Lever
from recipes.training.run import Run

COMPONENTS = {
    "data": {"encoded_in_loop": "benchmarks.baseline:encoded_in_loop"},
    "algorithm": {
        "composer_ema": "benchmarks.baseline:ComposerEMA",
        "cpu_autocast": "benchmarks.baseline:CPUAutocast",
    },
}


def register() -> None:
    """Make them known to recipes of this process."""
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
    """The samples of an encoded set, in the order of `data.latents.latents`, encoded anew in every step.

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


class ComposerEMA(Lever):
    """The moving average of `composer.algorithms.EMA`, updated after every batch from the first on."""

    def __init__(self, *, decay: float = 0.9999) -> None:
        """
        Args:
            decay: share of the average that an update keeps.
        """
        self.decay = decay
        self.average: EMAParameters | None = None

    def begin(self, run: Run) -> None:
        self.average = EMAParameters(run.module)

    def step_end(self, run: Run) -> None:
        compute_ema(run.module, self.average, smoothing=self.decay)


class GroupNorm32(nn.GroupNorm):
    """What a GPU's autocast makes of a GroupNorm, also on a CPU, whose autocast leaves it alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class LayerNorm32(nn.LayerNorm):
    """As GroupNorm32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class CPUAutocast(Lever):
    """bfloat16 autocast around a task's losses on a CPU, where Composer has none."""

    def __init__(self, task: nn.Module, *, norms: Literal["fp32", "low"] = "fp32") -> None:
        """
        Args:
            norms: in 32 bits as under a GPU's autocast, or as low_precision_norms makes them.
        """
        self.task = task
        self.norms = norms

    def change_modules(self, run: Run) -> None:
        if self.norms == "low":
            lower_norms(self.task)
        else:
            for module in self.task.modules():
                module.__class__ = {nn.GroupNorm: GroupNorm32, nn.LayerNorm: LayerNorm32}.get(
                    type(module), type(module)
                )
        for name in ("forward", "evaluate"):
            setattr(self.task, name, torch.autocast("cpu", torch.bfloat16)(getattr(self.task, name)))


class Losses(Callback):
    """Appends the training loss of every batch to a list."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def batch_end(self, state: State, logger: Logger) -> None:
        self.values.append(float(state.total_loss_dict["loss/train/total"]))
