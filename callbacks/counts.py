"""How often each of K numbers occurs, counted on the device."""

from __future__ import annotations

from torch import Tensor


def add_counts(counts: Tensor, numbers: Tensor) -> Tensor:
    """Add how often each number occurs to `counts`, in place, and return them. The host does not wait for the device.

    `torch.bincount` makes it wait for the largest number.

    Args:
        counts: (K,) int64.
        numbers: (...) int64, from 0 to K - 1, on the same device.
    """
    numbers = numbers.flatten()
    return counts.index_add_(0, numbers, numbers.new_ones(()).expand_as(numbers))
