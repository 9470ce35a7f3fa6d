"""The device memory that PyTorch's allocator holds in the course of a run."""

from __future__ import annotations

import torch

from data.system.log import log
from recipes.training.callback import Callback
from recipes.training.run import Run

# A key of torch.cuda.memory_stats() -> the name that it is logged under.
STATISTICS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


class MemoryMonitor(Callback):
    """Logs current and peak GPU memory of the first rank after each backward pass, in GB, as `memory/<statistic>`.

    The statistics are allocated, active, inactive and reserved memory, and how often the allocator had to free its
    cache and try again (see `torch.cuda.memory_stats`). There is nothing to log on a CPU.
    """

    def __init__(self) -> None:
        pass

    def begin(self, run: Run) -> None:
        if not run.on_gpu:
            log.info("memory_monitor: this run is on a CPU, so there is no GPU memory to log")

    def gradients_ready(self, run: Run) -> None:
        if run.on_gpu:
            run.log({f"memory/{name}": value for name, value in memory(torch.cuda.memory_stats()).items()})


def memory(stats: dict[str, int]) -> dict[str, float]:
    """The statistics that are logged; bytes become GB (10^9 bytes) of five significant digits.

    Args:
        stats: as `torch.cuda.memory_stats` returns them; what it lacks is left out.
    """
    return {
        name: float(f"{stats[key] / 1e9:.5g}") if "bytes" in key else stats[key]
        for key, name in STATISTICS.items()
        if key in stats
    }
