"""Whole copies of a model on several ranks, as both engines build them."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(module: nn.Module, averaged: bool) -> nn.Module:
    """A module that begins with the weights of the first rank, and whose gradients are averaged over all ranks.

    Args:
        module: on the rank's device. Every rank must call this.
        averaged: a lever averages the gradients, so that the module needs no DistributedDataParallel around it.
    """
    if averaged:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return module
    # Gradients are views of the buckets that are averaged, which saves a copy of all gradients, in time and in memory.
    return DistributedDataParallel(module, gradient_as_bucket_view=True)
