"""In which shard of a data set a sample is, in memory for each shard and not for each sample."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from streaming.base import dataset


class ShardPlaces:
    """In place of streaming's `Spanner`, which lists the shard of every sample while it is made: 8 bytes for each, in
    every process that opens the set.

    Args:
        shard_sizes: (shards,) int64, the number of samples in each.
    """

    def __init__(self, shard_sizes: np.ndarray) -> None:
        # An array of Python's: NumPy takes longer to find one value than to find a thousand.
        self._ends = array("q", shard_sizes.cumsum(dtype=np.int64).tobytes())

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The number of the shard of a sample, and the number of the sample in it.

        Raises:
            IndexError: there is no such sample.
        """
        index = int(index)
        shard = bisect_right(self._ends, index)
        if index < 0 or shard == len(self._ends):
            raise IndexError(f"sample {index} of {self._ends[-1] if self._ends else 0}")
        return shard, index - (self._ends[shard - 1] if shard else 0)


@contextmanager
def compact_places() -> Iterator[None]:
    """A context in which a StreamingDataset that is made uses `ShardPlaces`."""
    before = dataset.Spanner
    dataset.Spanner = ShardPlaces
    try:
        yield
    finally:
        dataset.Spanner = before
