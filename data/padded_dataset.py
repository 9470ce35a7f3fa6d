"""Validation samples that each rank holds in memory, filled up so that all ranks have equally many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from data.loading import WEIGHT


class PaddedDataset(IterableDataset):
    """Samples in memory, those of this rank alone, and blank ones up to the number of the rank with the most.

    A sample also has its `weight`, a float32 scalar: 1, and 0 if it is blank. Sharded models exchange their weights in
    each (micro)batch, so all ranks must have equally many of equal sizes.

    Not a list: Composer demands that a sampler divides one over the ranks.
    """

    def __init__(self, samples: Sequence[dict[str, Tensor]], blank: Mapping[str, Tensor]) -> None:
        """Every rank must call it.

        Args:
            samples: of this rank.
            blank: a sample that stands for none.

        Raises:
            ValueError: no rank has a sample.
        """
        counts = [len(samples)]  # of all ranks
        if torch.distributed.is_initialized() and (world := torch.distributed.get_world_size()) > 1:
            counts *= world
            torch.distributed.all_gather_object(counts, len(samples))
        if max(counts) == 0:
            raise ValueError("pictures: the validation set has no usable image; check its source and its filter")
        one, none = torch.tensor(1.0), torch.tensor(0.0)
        self.samples = [{**sample, WEIGHT: one} for sample in samples]
        self.samples += [{**blank, WEIGHT: none}] * (max(counts) - len(samples))

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.samples)
