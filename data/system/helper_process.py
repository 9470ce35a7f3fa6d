"""A helper process, for what would make this one's threads wait for Python's global interpreter lock.

A store's client computes checksums, signs and copies in Python: a thread of this process would be simpler, but what
this process does between the kernels of a GPU would wait for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.system.disk_errors import may_pass
from data.system.errors import Outage

PR_SET_PDEATHSIG = 1  # of Linux' prctl


class HelperProcess:
    """Does tasks one after another.

    The helper is killed (SIGKILL) when the thread that started it ends. Start it in the main thread: it then ends with
    this process, and a job that is started again never meets the helper of its previous start. The helper ignores
    SIGINT, SIGTERM and SIGUSR1, so that it finishes what this process waits for.

    Args:
        script: that calls `serve`.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            ValueError: the system starts no further process.
        """
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, str(self._script), str(os.getpid())]
        pipe = subprocess.PIPE
        try:
            # A session of its own: Ctrl-C reaches all processes of a terminal, also before `serve` ignores it.
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        except OSError as error:
            raise ValueError(f"{self._script.stem}: the process cannot be started ({error.strerror})") from error

    def do(self, task: Mapping[str, Any]) -> None:
        """Give the process a task, and wait until it is done.

        Args:
            task: what JSON can hold.

        Raises:
            ValueError: as the process raised it, an `Outage` too; or the process has ended.
        """
        self.start()
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ValueError(f"{self._script.stem}: the process has ended with status {self._process.wait()}")
        if (failure := json.loads(answer)) is not None:
            text, outage = failure
            raise Outage(text) if outage else ValueError(text)

    def end(self) -> None:
        """End the process when it has done its task. It may be started again."""
        if self._process is not None:
            with suppress(BrokenPipeError):  # it has ended
                self._process.stdin.write("null\n")  # forked workers hold the pipe, so closing it would not end it
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def kill(self) -> None:
        """End the process at once. `do`, in another thread, then says that it has ended."""
        if self._process is not None:
            self._process.kill()


def serve(act: Callable[[dict[str, Any]], None]) -> None:
    """Do the tasks of the process whose number is this one's argument, until one of them is None, or it ends.

    Args:
        act: called with each task; a ValueError or OSError is the answer to it, and other errors end the process.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # Slurm sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # libraries may print past Python's file, too
    for line in sys.stdin:
        task, failure = json.loads(line), None
        if task is None:
            break
        try:
            act(task)
        except (ValueError, OSError) as error:
            failure = str(error), may_pass(error)
        print(json.dumps(failure), file=answers, flush=True)


def end_with_parent(number: int) -> None:
    """Ask Linux for a signal to this process when the thread that started it ends; 0: for none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
