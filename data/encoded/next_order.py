"""The order of the next epoch, made by a process of its own while the present epoch is read.

streaming makes the order of an epoch when the epoch begins, in one worker per machine, and all devices wait for it.
That takes some tenths of a second per million samples, however many devices there are: the more of them, the larger is
its share of an epoch. An order depends on nothing that is read.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.system.helper_process import end_with_parent

LONGEST = 600.0  # seconds that are waited for an order; a third of what training waits for a batch
PAUSE = 0.002  # seconds


class NextOrder:
    """Makes one order ahead, in a forked process.

    A process, because most of the work holds Python's global interpreter lock, for which the reading would wait. It has
    what this process knows of the samples, without a copy. It ends with the thread that forked it.
    """

    def __init__(self) -> None:
        self._made: tuple[Hashable, int, int] | None = None  # what is made, the process, and the file of its result

    def begin(self, key: Hashable, make: Callable[[], NDArray[np.int64]]) -> None:
        """Start to make an order. One that was not taken is dropped.

        Nothing is done where the system starts no further process or has no memory for a file.

        Args:
            key: what the order depends on.
            make: returns it; it starts no thread and needs none.
        """
        self._drop()
        try:
            file = os.memfd_create("order of the next epoch")
        except OSError:
            return
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError:
            os.close(file)
            return
        if process:
            self._made = key, process, file
            return
        status = 1
        try:  # nothing of the parent's may run here: no exception leaves, and no function for the end of a process
            end_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                gc.disable()  # a search would copy all memory with objects
                os.nice(10)
                with suppress(OSError):  # where memory is lacking, the kernel ends this process and not the training
                    Path("/proc/self/oom_score_adj").write_text("1000")
                with open(file, "wb", closefd=False) as out:
                    np.save(out, make(), allow_pickle=False)
                status = 0
        finally:
            os._exit(status)

    def take(self, key: Hashable) -> NDArray[np.int64] | None:
        """The order that was begun with this key, as read-only memory; waits until it is made.

        None where none was begun, another one was, or the process has failed or takes longer than `LONGEST`.
        """
        if self._made is None or self._made[0] != key:
            self._drop()
            return None
        _, process, file = self._made
        self._made = None
        limit = time.monotonic() + LONGEST
        try:
            while not (ended := os.waitpid(process, os.WNOHANG))[0]:
                if time.monotonic() > limit:
                    os.kill(process, signal.SIGKILL)
                time.sleep(PAUSE)
            return np.load(f"/proc/self/fd/{file}", mmap_mode="r", allow_pickle=False) if ended[1] == 0 else None
        except (OSError, ValueError):  # nobody asks how processes end, or it was killed while it wrote
            return None
        finally:
            os.close(file)

    def _drop(self) -> None:
        if self._made is not None:
            _, process, file = self._made
            self._made = None
            os.close(file)
            with suppress(ProcessLookupError, ChildProcessError):  # where nobody asks how processes end
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
