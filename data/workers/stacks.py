"""Stacks of data workers, for a run that hangs: each writes its own into memory that the trainer reads."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2

_memory: int | None = None  # file descriptor that workers inherit when they are forked


def keep_stacks() -> None:
    """Make the memory. Workers that are forked later can be asked for their stacks."""
    global _memory
    if _memory is None:
        _memory = os.memfd_create("stacks")


def give_stacks() -> None:
    """For a worker process: at `SIGNAL`, write down where all threads are. It works while Python's lock is held."""
    if _memory is not None:
        faulthandler.register(SIGNAL, file=_memory)


def stacks_of_workers() -> dict[int, str]:
    """Asks all workers of this process for their stacks, and gives each a second to write.

    Returns:
        Process -> what faulthandler wrote: a line per call, the innermost first.
    """
    found = {}
    for worker in multiprocessing.active_children():
        if _memory is None or worker.pid is None or not _catches(worker.pid):
            continue
        begin = os.fstat(_memory).st_size
        try:
            os.kill(worker.pid, SIGNAL)
        except ProcessLookupError:  # the main thread has ended it: an error here would end the watchdog
            continue
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit and os.fstat(_memory).st_size == begin:
            time.sleep(0.02)
        time.sleep(0.1)  # until the last line is written
        found[worker.pid] = os.pread(_memory, 1 << 20, begin).decode("utf-8", "replace")
    return found


def _catches(process: int) -> bool:
    """Whether a process has a handler for `SIGNAL`, which would end it otherwise."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
