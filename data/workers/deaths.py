"""Processes that die while they read or decode samples: where each one was, and an error that says so."""

from __future__ import annotations

import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from types import FrameType

import numpy as np
from torch.utils.data import get_worker_info

from data.sources.base import InputShard, Position

# PyTorch's messages about a worker that was killed, and about one without memory for its batch.
DEAD_WORKER = re.compile(r"DataLoader worker \(pid")
NO_MEMORY = re.compile(
    r"shared memory|No space left on device|Cannot allocate memory|can't allocate memory|unable to resize file"
)
PINNING = "Pin memory thread exited unexpectedly"  # the same thread gets what workers hand over
NOTICED = 10.0  # seconds in which the end of a process is noticed
NOWHERE = -1  # the shard of a worker that neither reads nor decodes

_alarms: list[str] = []  # errors of PyTorch's handler, since the workers were last ended


class Places:
    """Where each worker process is: which sample it reads or decodes. The memory is shared with processes forked later.

    Args:
        shards: what is read.
    """

    WORKERS = 1024
    ROW = np.dtype([("process", "i8"), ("shard", "i8"), ("number", "i8"), ("key", "S232")])

    def __init__(self, shards: list[InputShard]) -> None:
        self._shards = shards
        self._numbers = {shard: number for number, shard in enumerate(shards)}
        self._rows = np.frombuffer(mmap.mmap(-1, self.ROW.itemsize * self.WORKERS), self.ROW)  # leaves nothing behind

    def mark(self, shard: InputShard, number: int, key: str = "") -> None:
        """This worker begins to read a sample, or, where it says its key, to decode it."""
        worker = get_worker_info()
        if worker is not None and worker.id < self.WORKERS:
            text = key.encode("utf-8", "backslashreplace")
            self._rows[worker.id] = os.getpid(), self._numbers[shard], number, text

    def leave(self) -> None:
        """This worker does something else now."""
        worker = get_worker_info()
        if worker is not None and worker.id < self.WORKERS:
            self._rows["shard"][worker.id] = NOWHERE

    def of(self, processes: Collection[int]) -> list[Position]:
        """Where some processes were, except for those that did something else."""
        return [
            Position(self._shards[row["shard"]], int(row["number"]), row["key"].decode("utf-8", "replace"))
            for row in self._rows
            if row["process"] in processes and row["shard"] != NOWHERE
        ]

    def ended(self) -> set[int]:
        """The worker processes that have begun a sample and run no more."""
        return self.processes() - {process.pid for process in active_children()}

    def forget(self) -> None:
        """All worker processes have been ended: nothing is known of their successors."""
        self._rows["process"] = 0
        _alarms.clear()

    def processes(self) -> set[int]:
        """The worker processes that have begun a sample."""
        return {int(process) for process in self._rows["process"] if process}


class DecoderDied(Exception):
    """A process died.

    Attributes:
        reason: one line.
        positions: what the processes that died were at.
    """

    def __init__(self, reason: str, positions: list[Position]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.positions = positions


@contextmanager
def worker_deaths(places: Places, workers: int) -> Iterator[None]:
    """A context for using the batches of a DataLoader's workers, in which the death of a worker raises `DecoderDied`.

    PyTorch notices by a signal that a worker has died, and raises wherever this process is at that moment, unless
    `keep_alarms` was called.

    Args:
        places: where the workers are.
        workers: number of worker processes.

    Raises:
        DecoderDied: a worker process died.
        ValueError: there was no memory for a worker's batch.
    """
    try:
        yield
    except (RuntimeError, EOFError, ConnectionError) as error:
        text = str(error)
        if isinstance(error, EOFError | ConnectionError) or PINNING in text:
            with worker_deaths(places, workers):  # PyTorch may notice it meanwhile
                dead = _ended_soon(places, workers)
            if not dead:
                raise
            processes = ", ".join(map(str, sorted(dead)))
            reason = f"DataLoader worker (pid(s) {processes}) exited while it handed over a batch"
            # Bound to no name: this frame and the error would keep each other, and with them the loader's iterator.
            raise DecoderDied(reason, places.of(dead)) from error
        if not workers or not (DEAD_WORKER.search(text) or NO_MEMORY.search(text)):
            raise
        reason = text.strip().splitlines()[-1]  # the lines before are the worker's traceback
        if NO_MEMORY.search(text):
            raise died(reason) from error
        dead = re.findall(r"\d+", re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", text)[1])
        # Of PyTorch's handler, which names the signal. It also raises in the wait for a batch, where PyTorch then says
        # that the worker "exited unexpectedly".
        alarms = [alarm for alarm in [*_alarms, str(error.__cause__)] if re.search(rf"\(pid {dead[0]}\)", alarm)]
        reason = alarms[0].split(". ")[0] if alarms else reason  # then advice for programmers
        if any(map(NO_MEMORY.search, alarms)):  # a bus error, for which no image is to blame
            raise died(reason) from error
        raise DecoderDied(reason, places.of({int(process) for process in dead})) from error


def _ended_soon(places: Places, workers: int) -> set[int]:
    """The worker processes that died while they handed over a batch; PyTorch did not see yet that they had."""
    end = time.monotonic() + NOTICED
    while workers and not places.ended() and time.monotonic() < end:
        time.sleep(0.05)
    return places.ended() if workers else set()


def keep_alarms() -> None:
    """Keep PyTorch's signal handler from raising an error about a dead worker wherever this process is.

    After an error in a step of the optimizer, for instance, nothing could go on. PyTorch also notices a dead worker
    when it waits for a batch.

    Call it when a DataLoader has started workers. It does nothing outside of the main thread.
    """
    theirs = signal.getsignal(signal.SIGCHLD)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(theirs) or getattr(theirs, "keeps_alarms", False):
        return

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            theirs(number, frame)
        except RuntimeError as error:
            _alarms.append(str(error))

    keep.keeps_alarms = True
    signal.signal(signal.SIGCHLD, keep)


def raise_alarm() -> None:
    """Raise what `keep_alarms` has kept, where nothing is under way.

    Raises:
        RuntimeError: a worker has died, see `worker_deaths`.
    """
    if _alarms:
        raise RuntimeError(_alarms[0])


def forget_alarms() -> None:
    """Before a DataLoader starts workers: those of another one have been ended."""
    _alarms.clear()


def died(reason: str) -> ValueError:
    """The error that ends a job whose worker processes die."""
    return ValueError(
        f"a decoding process died ({reason}); it may have run out of memory, or of shared "
        "memory (/dev/shm; in Docker --shm-size=8g): lower workers, prefetch or batch"
    )
