"""A data component for benchmarks only: random latents and text embeddings, for measuring the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from data.latents import LatentTransform
from data.loading import Batch, Loading, Placement

REDUCTION = 8  # pixels per latent, in each direction
TEXT_LENGTH = 77  # tokens per caption


def random_latents(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    resolution: int,
) -> Loading:
    """Batches as `data.latents` reads them, without reading: two are made, and come in turns.

    Args:
        resolution: side of the images in pixels.
    """
    draw = torch.Generator().manual_seed(placement.seed + placement.rank)
    shape = (placement.batch, requirements["channels"], resolution // REDUCTION, resolution // REDUCTION)
    text = (placement.batch, TEXT_LENGTH, requirements["text_width"])

    def batch() -> Batch:
        found = {
            "mean": torch.randn(shape, generator=draw).half(),
            "std": torch.rand(shape, generator=draw).half() * 0.1,
            "text": torch.randn(text, generator=draw).half(),
            "seed": torch.randint(2**62, shape[:1], generator=draw),
        }
        return {name: tensor.pin_memory() if placement.pin else tensor for name, tensor in found.items()}

    null_text = torch.randn(text[1:], generator=draw).half()
    transform = LatentTransform(null_text=null_text, caption_dropout=0.1, sample_posterior=True, flip=0.0)
    loader = DataLoader(InTurns([batch(), batch()], 1_000_000), batch_size=None)
    return Loading(loader, transform, resolution=resolution, null_text=null_text)


class InTurns(IterableDataset):
    """Whole batches in memory, again and again. Every rank has its own."""

    def __init__(self, made: list[Batch], count: int) -> None:
        self.made, self.count = made, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self.made), self.count)
