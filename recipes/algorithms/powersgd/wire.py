"""Sums over a process group whose numbers travel in a 16-bit format."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.algorithms.sixteen_bit.formats import Float32, Format


def all_reduce_sum(values: Tensor, group: ProcessGroup, wire: Format, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The sum over a group, bit for bit the same on every rank of it.

    Process groups know no 1-6-9 numbers, so the two halves of an all-reduce are made here: each rank gets everyone's
    codes of its own part, adds their values in 32-bit in the order of ranks, and sends everyone the codes of the sum.
    As many bytes travel as in a ring: 2 (W - 1) / W times two bytes a value. Each value is rounded twice.

    What is not finite is replaced before it is sent, so that no rank's sum is: infinities by the format's largest value
    with their sign, NaN by zero. Whether that happened here is returned beside the sum.

    Args:
        values: (N,) float32.
        group: ranks whose values are added.
        wire: format of what is sent; 32-bit: an ordinary all-reduce.
        scale: what values are multiplied by to lie in the format's range; the sum is divided by it.

    Returns:
        (N,) float32, and a bool scalar: whether this rank's values were all finite.
    """
    finite = torch.isfinite(magnitude(values))
    ranks = dist.get_world_size(group)
    if isinstance(wire, Float32):
        largest = wire.largest / ranks  # the sum of as many is finite
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
    return wire.decode(codes[: values.numel()]) / scale, finite


def magnitude(values: Tensor) -> Tensor:
    """The largest one, scalar; not finite where any value is not (a NaN is passed on), so that one pass says both."""
    return torch.linalg.vector_norm(values, math.inf) if values.numel() else values.new_zeros(())


def bytes_sent(count: int, ranks: int, wire: Format) -> float:
    """Bytes that a rank sends in an all-reduce of so many numbers."""
    return 2 * (ranks - 1) / ranks * count * wire.bits / 8


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)  # process groups send no 16-bit integers
