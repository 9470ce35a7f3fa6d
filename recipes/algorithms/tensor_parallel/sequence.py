"""Sequence parallelism: between divided branches, positions are divided over devices (Korthikanti et al. 2022).

Each device has B x S/N positions of the stream, and computes norms, dropout and sums for these only. Where a branch is
entered, an all-gather takes the place of nothing, and where it is left, a reduce-scatter that of the all-reduce; in the
backward pass it is the other way round. What a branch gathers is not kept for the backward pass but gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from recipes.algorithms.tensor_parallel.collectives import gathered, summed

Exchange = Callable[[Tensor, ProcessGroup], Tensor]


def whole_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """The positions of all devices, (B, S/N, d) -> (B, S, d), without a gradient."""
    return gathered(x, group).movedim(0, 1).flatten(1, 2)


def own_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """This device's positions, (B, S, d) -> (B, S/N, d), in memory of their own, without a gradient."""
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def scattered_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """This device's positions of the sum over devices, (B, S, d) -> (B, S/N, d), without a gradient."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()  # (N, B, S/N, d)
    found = parts.new_empty(parts[0].numel())  # gloo knows no other shape
    dist.reduce_scatter_tensor(found, parts.flatten(), group=group)
    return found.view(parts.shape[1:])


class _Exchange(Function):
    """A function of a tensor and a group. Backward: another one, of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


class _Shared(Function):
    """The identity for several tensors. Backward: their sums over the group, in one message."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = summed(torch.cat([grad.flatten() for grad in grads]), ctx.group)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


def divide_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """The residual stream's beginning, which all devices have: (B, S, d) -> own positions (B, S/N, d)."""
    return _Exchange.apply(x, group, own_positions, whole_sequence)


def gather_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Into a region in which each device computes a part for all positions: (B, S/N, d) -> (B, S, d)."""
    return _Exchange.apply(x, group, whole_sequence, scattered_sum)


def scatter_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Out of such a region: this device's part (B, S, d) -> own positions of the sum (B, S/N, d)."""
    return _Exchange.apply(x, group, scattered_sum, whole_sequence)


def shared(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters that all devices have, for use on own positions: their gradients are sums over the devices."""
    return _Shared.apply(group, *tensors)


class Gathered:
    """The input of a branch's column layers in one pass: own positions are kept, the others are gathered again.

    Args:
        own: (B, S/N, d), without a gradient.
        whole: from own positions to the input of the column layers, (B, S, d).
        layers: number of the column layers.
    """

    def __init__(self, own: Tensor, whole: Callable[[Tensor], Tensor], layers: int) -> None:
        self.own: Tensor | None = own
        self.whole = whole
        self.layers = layers
        self.taken = self.left = 0
        self.again: Tensor | None = None

    def take(self) -> Tensor:
        """Own positions, for each layer once; the last one leaves none here."""
        own = self.own
        self.taken, self.left = self.taken + 1, self.left + 1
        if self.taken == self.layers:
            self.own = None
        return own

    def gather(self, own: Tensor) -> Tensor:
        """The layers' input in the backward pass: one message for all of them."""
        if self.again is None:
            self.again = self.whole(own)
        found = self.again
        self.left -= 1
        if not self.left:
            self.again = None
        return found


class _Columns(Function):
    """A linear layer that keeps own positions of its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, kept: Gathered) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.kept, ctx.biased = kept, bias is not None
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        rows = ctx.kept.gather(own).flatten(0, 1)  # (B S, d)
        flat = grad.flatten(0, 1)
        return grad @ weight, None, flat.T @ rows, flat.sum(0) if ctx.biased else None, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, kept: Gathered) -> Tensor:
    """(B, S, d) -> (B, S, outputs), as torch.nn.functional.linear.

    Args:
        x: what `kept` gathers.
        weight: (outputs, d), in the dtype of x.
        bias: (outputs,), in the dtype of x.
        kept: of this pass.
    """
    return _Columns.apply(x, kept.take(), weight, bias, kept)
