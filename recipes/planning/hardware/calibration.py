"""What this machine reaches: matrix products, copies in memory, short operations, and links between processes."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from data.cost import count_text, size_text
from data.own_gpu import check_own_gpu
from data.system.memory import MEMORY
from data.system.process_groups import leave
from recipes.models.sampling import DTYPES
from recipes.planning.hardware.gpus import Device, Shares
from recipes.planning.hardware.link_rate import all_reduce_rate, synchronize

SMALLEST, LARGEST = 256, 16384  # sides of the matrices
ENOUGH = 0.05  # seconds: a product that takes as long is timed well, and is not enlarged
ROUNDS = 5
OPERATIONS = 500
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes, more than caches hold


def calibrate() -> tuple[Device, dict[str, Any]]:
    """Measure this process's device, and the links to those of the other processes that the launcher has started.

    Every process must call it. The links within the machine are measured if LOCAL_WORLD_SIZE is above 1, those between
    machines if WORLD_SIZE is above that.

    Returns:
        The device, whose rates are what was reached: its shares are 1. And under which circumstances.

    Raises:
        ValueError: an all-reduce gives wrong sums, or there are more processes than GPUs on this machine.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        check_own_gpu("--calibrate")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    within = between = None
    if world > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=120))
    try:
        # All processes at the same time, as in a run: those of a CPU share its memory.
        peaks = {name: products(kind, dtype) for name, dtype in DTYPES.items()}
        if kind == "cuda":
            peaks["tf32"] = products(kind, torch.float32, tf32=True)
        bandwidth, gap = copies(kind), operations(kind)
        if world > 1:
            within, between = links(torch.device(kind), world, local)
    finally:
        if world > 1:
            leave()
    device = Device(
        name=torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine(),
        memory=memory(kind) / (1 if kind == "cuda" else local),
        bandwidth=bandwidth,
        within=within,
        between=between,
        shares=Shares(compute=1.0, memory=1.0, links=1.0, gap=gap),
        peaks=peaks,
    )
    circumstances = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "processes": world,
        "processes per machine": local,
        "threads": torch.get_num_threads(),
    }
    return device, circumstances


def describe(device: Device) -> str:
    """The measured rates, in lines."""
    products = ", ".join(f"{name} {peak / 1e12:,.3g}" for name, peak in device.peaks.items())
    rates = {"within a machine": device.within, "between machines": device.between}
    sent = ", ".join(f"{size_text(rate)}/s {where}" for where, rate in rates.items() if rate is not None)
    return "\n".join(
        [
            f"{device.name}: {size_text(device.memory)} of memory, {size_text(device.bandwidth)}/s",
            f"matrix products, TFLOP/s: {products}",
            f"an operation takes {1e6 * device.shares.gap:.1f} us at the least",
            f"links: {sent or 'not measured, because there is one process'}",
        ]
    )


def products(kind: str, dtype: torch.dtype, tf32: bool = False) -> float:
    """FLOP/s of products of square matrices, as large as it takes to time one."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        side = SMALLEST
        while True:
            a, b = (torch.randn(side, side, device=kind).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = median_seconds(kind, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
            if seconds >= ENOUGH or side >= LARGEST:
                return 2 * side**3 / seconds
            side *= 2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def copies(kind: str) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED[kind] // 4, device=kind)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(kind, lambda: target.copy_(source))


def operations(kind: str) -> float:
    """Seconds of an operation that does next to nothing."""
    x = torch.zeros(1, device=kind)

    def work() -> None:
        for _ in range(OPERATIONS):
            x.add_(1.0)

    return median_seconds(kind, work) / OPERATIONS


def links(device: torch.device, world: int, local: int) -> tuple[float | None, float | None]:
    """Bytes per second that a device sends in its machine, and that a machine sends to others; None: there are none.

    Raises:
        ValueError: an all-reduce gives wrong sums.
    """
    rank, machines = dist.get_rank(), world // local
    within = between = None
    if local > 1:
        groups = [dist.new_group(range(m * local, (m + 1) * local)) for m in range(machines)]
        within = checked_rate(device, groups[rank // local])
    if machines > 1:
        # The devices of a machine send at the same time, each to those of its number in the others.
        groups = [dist.new_group(range(number, world, local)) for number in range(local)]
        between = local * checked_rate(device, groups[rank % local])
    return within, between


def checked_rate(device: torch.device, group: ProcessGroup) -> float:
    """The rate of an all-reduce. Raises ValueError where its sums are wrong."""
    rate = all_reduce_rate(device, group)
    if rate is None:
        size = count_text(dist.get_world_size(group), "rank")
        raise ValueError(f"links: an all-reduce over {size} gives wrong sums: check cables and memory")
    return rate


def memory(kind: str) -> float:
    """Bytes of memory of the GPU, or that this process may take."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return MEMORY


def median_seconds(kind: str, work: Callable[[], Any]) -> float:
    """Median seconds of a call, after one that is not counted."""
    device, seconds = torch.device(kind), []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds[1:]), math.ulp(1.0))
