"""Sums over a process group, with numbers sent in a 16-bit format."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9, Float32, Format

FORMATS = {"1-6-9": MEAN_1_6_9, "32-bit": FLOAT_32}  # by their names in recipes


def all_reduce_sum(values: Tensor, group: ProcessGroup, wire: Format, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The sum over a process group, equal bit by bit on all of its ranks.

    Process groups cannot add 1-6-9 numbers, so both halves of an all-reduce are done here: each rank receives all
    ranks' codes of its own part, adds their values in 32-bit in the order of ranks, and sends the codes of the sum to
    all ranks. As in a ring, 2 (W - 1) / W times two bytes per value are sent. Each value is rounded twice.

    Values that are not finite are replaced before they are sent, so that the sum is finite: infinities by the largest
    value of the format with their sign, NaN by zero.

    Args:
        values: (N,) float32 or float64.
        group: ranks whose values are added.
        wire: format in which values are sent; 32-bit: an ordinary all-reduce, in the dtype of the values.
        scale: factor that brings values into the range of the format when they are sent; the sum is divided by it.

    Returns:
        The sum (N,) in the dtype of the values, and () bool: whether all values of this rank were finite.
    """
    finite = torch.isfinite(magnitude(values))
    ranks = dist.get_world_size(group)
    if isinstance(wire, Float32):
        largest = wire.largest / ranks  # so that the sum over ranks is finite
        total = torch.nan_to_num(values, nan=0.0).clamp(-largest, largest)
        dist.all_reduce(total, group=group)
        return total, finite
    part = -(-values.numel() // ranks)
    codes = torch.zeros(ranks * part, dtype=wire.dtype, device=values.device)
    codes[: values.numel()] = wire.encode(values * scale)
    others = torch.empty_like(codes)
    dist.all_to_all_single(_bytes(others), _bytes(codes), group=group)
    own = wire.encode(wire.decode(others).view(ranks, part).sum(0))
    dist.all_gather_into_tensor(_bytes(codes), _bytes(own), group=group)
    return wire.decode(codes[: values.numel()]).to(values.dtype) / scale, finite


def magnitude(values: Tensor) -> Tensor:
    """The largest absolute value, a scalar. It is not finite if any value is not, so that one pass tells both."""
    return torch.linalg.vector_norm(values, math.inf) if values.numel() else values.new_zeros(())


def bytes_sent(count: int, ranks: int, wire: Format) -> float:
    """Bytes that a rank sends in an all-reduce of `count` numbers."""
    return 2 * (ranks - 1) / ranks * count * wire.bits / 8


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)  # process groups send no 16-bit integers
