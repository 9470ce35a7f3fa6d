"""Checks of what lies between the processes of a run: their clocks and the links of their devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from data.cost import FLOAT, all_reduce_bytes, size_text
from recipes.planning.finding import Finding

# Clocks that differ by more than this confuse logs, and certificates and tokens of object stores.
CLOCKS = 1.0  # seconds
WORDS = 1 << 24  # of 4 bytes: 64 MiB, as large as a bucket of DDP or a block under FSDP
ROUNDS = 5


def link_checks() -> Iterator[Finding]:
    """The clocks of all processes, and the rate of an all-reduce over them; nothing if there is one process."""
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        yield clocks(device)
        yield bandwidth(device)
    finally:
        dist.destroy_process_group()


def clocks(device: torch.device) -> Finding:
    """How far the clocks of the machines differ, up to the time that a barrier takes."""
    times = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.barrier()
    times[dist.get_rank()] = time.time()
    dist.all_reduce(times)
    difference = (times.max() - times.min()).item()
    if difference > CLOCKS:
        late = int(times.argmin())
        return Finding(
            "warning", "clocks", f"differ by {difference:.1f} s; rank {late} is last: synchronise them (chrony or ntpd)"
        )
    return Finding("ok", "clocks", f"differ by less than {difference + 0.05:.1f} s")


def bandwidth(device: torch.device) -> Finding:
    """The rate of an all-reduce, as the bytes that each device sends per second in a ring."""
    world, rate = dist.get_world_size(), all_reduce_rate(device)
    if rate is None:
        return Finding("error", "links", f"an all-reduce over {world} ranks gives wrong sums: check cables and memory")
    size = size_text(FLOAT * WORDS)
    return Finding("ok", "links", f"{size_text(rate)}/s per device in an all-reduce of {size} over {world} ranks")


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
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(words, group=group)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    right = bool((words == world).all())
    return all_reduce_bytes(words.nbytes, world) / min(seconds) if right else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
