"""A batch of samples, and its division into microbatches."""

from __future__ import annotations

from torch import Tensor


def samples_of(batch: dict[str, Tensor]) -> int:
    """Number of samples of a batch, the first dimension of its tensors."""
    return len(next(iter(batch.values())))


def split(batch: dict[str, Tensor], size: int | None) -> list[dict[str, Tensor]]:
    """A batch in parts of at most `size` samples, of which the last may be smaller; None: the batch in one part."""
    size = size or samples_of(batch)
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, samples_of(batch), size)
    ]
