"""How often each of K numbers occurs, counted on the device."""

from __future__ import annotations

from torch import Tensor


def add_counts(counts: Tensor, numbers: Tensor, samples: Tensor | None = None) -> Tensor:
    """Add how often each number occurs to `counts`, in place, and return them. The host does not wait for the device.

    `torch.bincount` makes it wait for the largest number.

    Args:
        counts: (K,) int64, or float64 where samples have weights.
        numbers: (B, ...) int64, from 0 to K - 1, on the same device.
        samples: (B,), how much each sample counts; None: once.
    """
    each = counts.new_ones(()) if samples is None else samples.to(counts.dtype).view(-1, *[1] * (numbers.dim() - 1))
    return counts.index_add_(0, numbers.flatten(), each.expand_as(numbers).flatten())
