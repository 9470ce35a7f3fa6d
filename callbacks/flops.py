"""FLOPs of a model, by PyTorch's counter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recipes.models.task import Task
from recipes.training.modes import evaluation_mode


@torch.no_grad()
def flops_per_sample(task: Task, batch: dict[str, Tensor]) -> float:
    """FLOPs of the forward pass per sample; a multiply-add counts as 2.

    The random number generators of the batch's devices are left as they were.

    Args:
        task: called with a batch, unless its `forward_flops()` returns the number.
        batch: tensors whose first dimension is the sample.
    """
    known = task.forward_flops()
    if known is not None:
        return known
    # Two samples, because one would be an edge case for contrastive losses and batch statistics.
    few = {name: tensor[:2] for name, tensor in batch.items()}
    devices = {tensor.device.index for tensor in few.values() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), evaluation_mode(task), FlopCounterMode(display=False) as counter:
        task(few)
    return counter.get_total_flops() / len(next(iter(few.values())))
