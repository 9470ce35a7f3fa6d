"""Communication between ranks, whichever engine started them. A single process needs no process group."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATIONS = {"SUM": dist.ReduceOp.SUM, "MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX}


def rank() -> int:
    """The number of this process among all processes of the run."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Whether this is rank 0, the process that writes files."""
    return rank() == 0


def all_reduce(tensor: Tensor, operation: Literal["SUM", "MIN", "MAX"] = "SUM") -> None:
    """Reduce a tensor over all ranks, in place. Every rank must call it, with the same shape and dtype."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPERATIONS[operation])


def smallest(value: int, device: torch.device) -> int:
    """The minimum of a value over all ranks. Every rank must call it."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    all_reduce(tensor, "MIN")
    return int(tensor.item())


def from_first_rank(value: Any) -> Any:
    """Broadcast the value of the first rank, any picklable object. Every rank must call it."""
    if world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def wait() -> None:
    """Wait for all ranks. Every rank must call it."""
    if world_size() > 1:
        dist.barrier()
