"""Whether tensors hold only finite values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.training.ranks import all_reduce
from recipes.training.run import Run


def largest_magnitude(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in this rank's part of some tensors, float32 (); NaN or infinite if one is.

    Each tensor is read once, and the host does not wait for the device.
    """
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    own = [tensor.detach() for tensor in own if tensor.is_floating_point() and tensor.numel()]
    if own and all(tensor.device.type == "cpu" for tensor in own):
        # Vectorised there, which the norm is not: a quarter of its time.
        return torch.stack([torch.stack(torch.aminmax(tensor)).float().abs().amax() for tensor in own]).amax()
    return torch.nn.utils.get_total_norm(own, math.inf).float() if own else torch.zeros(())


@torch.no_grad()
def has_finite_weights(run: Run) -> bool:
    """Whether all parameters of the run's task are finite. Every rank must call it; the answer is the same on all."""
    flag = largest_magnitude(run.task.parameters()).isfinite().logical_not().to(run.device, torch.int32).reshape(1)
    all_reduce(flag, "MAX")
    return not flag.item()


def is_worth_keeping(run: Run) -> bool:
    """Whether a checkpoint or an export of this moment may take the place of an earlier one. Every rank must call it.

    Not where a weight is not finite, and not while losses or gradients are not: the weights that led there may be
    finite and useless.
    """
    return not run.nonfinite and has_finite_weights(run)
