"""Sequence parallelism: between divided branches, positions are divided over devices (Korthikanti et al. 2022).

Each device has B x S/N positions of the stream, and computes norms, dropout and sums for these only. Where a branch is
entered, an all-gather takes the place of nothing, and where it is left, a reduce-scatter that of the all-reduce; in the
backward pass it is the other way round. What a branch gathers is not kept for the backward pass but gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from recipes.algorithms.tensor_parallel.collectives import exchange, gathered, summed
from recipes.training.compiled import result


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


class _Shared(Function):
    """The identity for several tensors. Backward: their sums over the group, in one message."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(map(result, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = summed(torch.cat([grad.flatten() for grad in grads]), ctx.group)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


def divide_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """The residual stream's beginning, which all devices have: (B, S, d) -> own positions (B, S/N, d)."""
    return exchange(x, group, own_positions, whole_sequence)


def gather_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Into a region in which each device computes a part for all positions: (B, S/N, d) -> (B, S, d)."""
    return exchange(x, group, whole_sequence, scattered_sum)


def scatter_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Out of such a region: this device's part (B, S, d) -> own positions of the sum (B, S/N, d)."""
    return exchange(x, group, scattered_sum, whole_sequence)


def shared(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters that all devices have, for use on own positions: their gradients are sums over the devices."""
    return _Shared.apply(group, *tensors)


class _Columns(Function):
    """Linear layers of one input, which keep own positions of it only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, whole: Callable[[Tensor], Tensor], *layers: Tensor | None) -> Any:
        weights, biases = layers[::2], layers[1::2]
        ctx.save_for_backward(own, *weights)
        ctx.whole, ctx.biased = whole, [bias is not None for bias in biases]
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, *weights = ctx.saved_tensors
        rows = ctx.whole(own).flatten(0, 1)  # (B S, d), one message for all layers
        grad_x, found = None, []
        for grad, weight, biased in zip(grads, weights, ctx.biased, strict=True):
            flat = grad.flatten(0, 1)
            found += [flat.T @ rows, flat.sum(0) if biased else None]
            grad_x = grad @ weight if grad_x is None else grad_x + grad @ weight
        return grad_x, None, None, *found


def column_products(
    x: Tensor, own: Tensor, whole: Callable[[Tensor], Tensor], layers: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, ...]:
    """Linear layers of one input, of which own positions are kept; the others are gathered again in the backward pass.

    Args:
        x: (B, S, d), the input.
        own: (B, S/N, d), from which `whole` makes it.
        whole: from own positions to the input, without a gradient.
        layers: weight (outputs, d) and bias (outputs,) of each, in the dtype of x.

    Returns:
        (B, S, outputs) of each layer.
    """
    return _Columns.apply(x, own.detach(), whole, *(parameter for layer in layers for parameter in layer))
