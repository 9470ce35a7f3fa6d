"""How many threads a process computes with on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def set_default_threads(spare: int = 1) -> None:
    """Set `OMP_NUM_THREADS`, unless the user has, for this process and those that it starts.

    The cores are divided among the processes that a launcher started on this machine (`LOCAL_WORLD_SIZE`): Composer's
    launcher leaves all of them to each process. OpenMP reads the variable when torch is imported, so commands call this
    before.

    Args:
        spare: cores per process that are left to data workers and other programs. Each operation waits for its slowest
            thread, and the others spin meanwhile: a thread that shares its core with another process delays all
            (`benchmarks/threads.py`). At least one thread remains.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    ranks = int(text) if text.isdecimal() else 1  # `Rank.from_environment` says what is wrong with it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(ranks, 1) - spare)))


@contextmanager
def all_cores() -> Iterator[None]:
    """A context in which torch computes on all cores that the process may use: for a rank that works while the others
    have ended or wait. Launchers leave few threads to each rank, torchrun one."""
    import torch  # not above: it reads OMP_NUM_THREADS

    before = torch.get_num_threads()
    torch.set_num_threads(max(before, len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
