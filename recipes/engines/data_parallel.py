"""DistributedDataParallel as both engines build it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(module: nn.Module) -> DistributedDataParallel:
    """A module whose gradients are averaged over all ranks in the backward pass.

    Gradients are views of the buckets that are averaged, which saves a copy of all gradients, in time and in memory.
    """
    return DistributedDataParallel(module, gradient_as_bucket_view=True)
