"""FLOPs of a model, by PyTorch's counter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recipes.models.task import Task
from recipes.training.modes import evaluation_mode


def flops_per_sample(blank: Callable[[], Task], batch: dict[str, Tensor]) -> float:
    """FLOPs of the forward pass per sample; a multiply-add counts as 2.

    They are counted for the model as it was built, on the meta device, where nothing is computed. Number formats,
    shards and fast kernels of a run make no difference: attention's products count too, which PyTorch's counter does
    not know under the names of other libraries' kernels. No random number of the run is drawn.

    Args:
        blank: makes the task on the meta device.
        batch: tensors on any device, whose first dimension is the sample.

    Raises:
        RuntimeError: the task cannot be called on the meta device, for instance because it reads a tensor's value.
    """
    # Two samples, because one would be an edge case for contrastive losses and batch statistics.
    few = {name: _on_meta(tensor[:2]) for name, tensor in batch.items()}
    with torch.random.fork_rng(devices=[]):  # of the host: what is on the meta device draws nothing
        task = blank()
        # With gradients: without, nn.MultiheadAttention is a single operation, which the counter does not know.
        with evaluation_mode(task), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            task(few)
    return counter.get_total_flops() / len(next(iter(few.values())))


def _on_meta(tensor: Tensor) -> Tensor:
    # Without autocast, inputs must have the weights' 32 bits.
    return torch.empty_like(tensor, device="meta", dtype=torch.float32 if tensor.is_floating_point() else None)
