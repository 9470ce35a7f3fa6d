"""A data component for benchmarks only: random latents whose samples bring the random numbers of training with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.common.random_latents import REDUCTION, TEXT_LENGTH
from data.loading import Loading, Placement
from data.random_numbers import ENTRY


class NumberedLatents(Dataset):
    """Samples that depend on their number alone."""

    def __init__(self, samples: int, latents: tuple[int, ...], text: tuple[int, ...]) -> None:
        self.samples, self.latents, self.text = samples, latents, text

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(number)
        latents, text = (torch.randn(shape, generator=draw) for shape in (self.latents, self.text))
        return {"latents": latents, "text": text, ENTRY: torch.tensor(number)}


def numbered_latents(placement: Placement, requirements: dict[str, Any], *, samples: int, resolution: int) -> Loading:
    """Batches of which every number of ranks has the same samples with the same noise, in batches of the same size.

    Args:
        samples: samples per epoch, over all ranks.
        resolution: side of the images in pixels.
    """
    side = resolution // REDUCTION
    rows = NumberedLatents(samples, (requirements["channels"], side, side), (TEXT_LENGTH, requirements["text_width"]))
    sampler = DistributedSampler(rows, placement.world, placement.rank, shuffle=placement.training, drop_last=True)
    return Loading(DataLoader(rows, placement.batch, sampler=sampler, drop_last=True, pin_memory=placement.pin))
