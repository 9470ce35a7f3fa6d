"""How many samples of each shard an epoch has, where it has only a part of a set: by `epoch_size`, `proportion` or
`repeat`.

streaming draws the part from all samples of the set, with 24 bytes for each sample of the set, and looks at those that
are drawn one by one. A short epoch of a billion samples would need more memory than a long one, and a set that is read
in a proportion would begin each epoch with half an hour of counting. Here the same samples are drawn, from the same
numbers at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from streaming.base import dataset
from streaming.base.sampling import get_sampling

WIDE = 1 << 32  # samples from which on their numbers need 64 bits


def drawn_parts(
    samples_per_shard: np.ndarray, choose: int, granularity: int, seed: int, epoch: int, use_epoch: bool
) -> np.ndarray:
    """As streaming's `get_sampling`, with the same result.

    Args:
        samples_per_shard: (shards,) int64.
        choose: number of samples to draw from all shards.
        granularity: number of samples that are drawn at a time from the same shard.
        seed, epoch: the draw depends on them.
        use_epoch: whether it depends on the epoch.

    Returns:
        (shards,) int64, the number of samples from each.
    """
    total = int(samples_per_shard.sum())
    times, left = divmod(int(choose), max(1, total))
    if granularity != 1 or choose < 0 or not left:  # whole repeats, and arguments that it refuses
        return get_sampling(samples_per_shard, choose, granularity, seed, epoch, use_epoch)
    # Generator.permutation takes 8 bytes for each number. The order is the same for any width.
    order = np.arange(total, dtype=np.uint32 if total < WIDE else np.int64)
    np.random.default_rng(seed + epoch if use_epoch else seed).shuffle(order)
    order = order[:left]
    order.sort()
    before = np.searchsorted(order, samples_per_shard.cumsum().astype(order.dtype))  # of one width: it would copy
    return samples_per_shard * times + np.diff(before, prepend=0)


@contextmanager
def lean_draws() -> Iterator[None]:
    """A context in which StreamingDatasets draw parts of sets by `drawn_parts`."""
    before = dataset.get_sampling
    dataset.get_sampling = drawn_parts
    try:
        yield
    finally:
        dataset.get_sampling = before
