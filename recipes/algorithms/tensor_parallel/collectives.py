"""The messages of a divided branch: f where it is entered, g where it is left (Shoeybi et al. 2019, figure 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from recipes.training.compiled import result

Exchange = Callable[[Tensor, ProcessGroup], Tensor]


class _Exchange(Function):
    """A function of a tensor and a group. Backward: another one, of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return result(there(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


def exchange(x: Tensor, group: ProcessGroup, there: Exchange, back: Exchange) -> Tensor:
    """`there(x, group)`, whose gradient is `back` of that of the result."""
    return _Exchange.apply(x, group, there, back)


def enter(x: Tensor, group: ProcessGroup) -> Tensor:
    """A tensor that all devices of a group have, into a region in which each of them computes a part.

    Args:
        x: (...), equal on all devices.
        group: the devices.

    Returns:
        x. Its gradient is the sum of the devices' gradients, and again equal on all of them.
    """
    return exchange(x, group, unchanged, summed)


def leave(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the devices' parts, out of that region.

    Args:
        x: (...), this device's part.
        group: the devices.

    Returns:
        The sum, equal on all devices, in the dtype of x.
    """
    return exchange(x, group, summed, unchanged)


def unchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """The tensor itself."""
    return x


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of a tensor over a group, in new memory: the gradient that autograd hands over may be used elsewhere."""
    total = x.clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """The devices' tensors of one shape, (...) -> (devices, ...)."""
    devices = dist.get_world_size(group)
    found = x.new_empty(devices * x.numel())  # gloo knows no other shape of the result
    dist.all_gather_into_tensor(found, x.contiguous().flatten(), group=group)
    return found.view(devices, *x.shape)
