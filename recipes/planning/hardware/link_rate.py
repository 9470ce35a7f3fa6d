"""The rate of an all-reduce between the devices of a run."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from data.cost import all_reduce_bytes

WORDS = 1 << 24  # of 4 bytes: 64 MiB, as large as a bucket of DDP or a block under FSDP
ROUNDS = 5


def all_reduce_rate(device: torch.device, group: ProcessGroup | None = None) -> float | None:
    """The bytes that each device sends per second in a ring all-reduce, at best; None: the sums are wrong.

    Args:
        device: of this process.
        group: the processes; None: all.
    """
    world, words = dist.get_world_size(group), torch.ones(WORDS, device=device)
    seconds = []
    for _ in range(ROUNDS):
        words.fill_(1.0)
        synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(words, group=group)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    right = bool((words == world).all())
    return all_reduce_bytes(words.nbytes, world) / min(seconds) if right else None


def synchronize(device: torch.device) -> None:
    """Wait for all that a GPU was given; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
