"""A batch of samples, and its division into microbatches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recipes.models.task import Task, described
from recipes.training import ranks
from recipes.training.transfer import sent


def samples_of(batch: dict[str, Tensor]) -> int:
    """Number of samples of a batch, the first dimension of its tensors.

    Raises:
        ValueError: it is no dict of tensors with the same first dimension. Of an entry for the batch as a whole, such
            as a mask (1, L), microbatches would get a part, and if it is the first one, only as many samples count.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"data: a batch is {described(batch)}; give a dict of tensors, with the sample first")
    sizes = {name: len(x) if isinstance(x, Tensor) and x.dim() else None for name, x in batch.items()}
    counts = [size for size in sizes.values() if size is not None]
    samples = max(counts, key=lambda size: (counts.count(size), size), default=None)  # what most entries have
    for name, size in sizes.items():
        if size is None or size != samples:
            raise ValueError(
                f"data: the entry {name!r} of a batch is {described(batch[name])}, and entries are divided into "
                f"microbatches; give tensors whose first dimension is the sample{f', here {samples}' * bool(samples)}"
            )
    return samples


def split(batch: dict[str, Tensor], size: int | None) -> list[dict[str, Tensor]]:
    """A batch in parts of at most `size` samples, of which the last may be smaller; None: the batch in one part."""
    size = size or samples_of(batch)
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, samples_of(batch), size)
    ]


def with_batch_means(batch: dict[str, Tensor], task: Task, device: torch.device) -> dict[str, Tensor]:
    """A batch together with the means that the task's loss needs, taken over the batches of all ranks.

    Every engine calls this before it divides the batch. The means of all names take one all-reduce, and the host does
    not wait for a GPU.

    Args:
        batch: the batch of this rank, on the host.
        task: names the means, see `Task.batch_means`.
        device: where ranks exchange numbers.

    Returns:
        The batch, with one further tensor (B,) float32 per mean, which has the same value for each sample.

    Raises:
        ValueError: as of `samples_of`.
    """
    samples = samples_of(batch)  # first: it finds entries that the task cannot use
    values = task.batch_means(batch)
    if not values:
        return batch
    # Sums of counts are exact in 64 bits, and so independent of the number of ranks.
    sums = sent([*(value.double().sum().item() for value in values.values()), samples], torch.float64, device)
    ranks.all_reduce(sums)
    means = (sums[:-1] / sums[-1]).float()
    return batch | {name: mean.expand(samples) for name, mean in zip(values, means, strict=True)}
