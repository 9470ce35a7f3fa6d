"""Signals that ask a run to stop: it saves a checkpoint at the end of the batch, and exits with a code of its own.

SIGTERM is what launchers, clusters and containers send before they kill; SIGUSR1 is what SLURM sends ahead of a time
limit (`--signal=USR1@120`). The exit code tells a script apart from success and from errors: start the same command
again, and it goes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 85  # "start me again": unused by shells, by Python and by launchers
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of Linux' prctl

_caught: str | None = None
_can_wait = False


class StartAgain(SystemExit):
    """Ends the process with `EXIT_CODE`. Engines raise it when the checkpoint of a run that is to stop is written."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def requested() -> bool:
    """Whether this process got a signal to stop."""
    return _caught is not None


def caught() -> str:
    """The name of the signal that this process got; other ranks' signals are not known here."""
    return _caught or "a signal to another rank"


@contextmanager
def between_batches() -> Iterator[None]:
    """Inside, a run looks at `requested` after each batch; elsewhere a signal ends the process at once.

    Until the first batch there is nothing to save.
    """
    global _can_wait
    _can_wait = True
    try:
        yield
    finally:
        _can_wait = False


@contextmanager
def stop_signals() -> Iterator[None]:
    """Inside, `SIGNALS` ask the process to stop. Handlers are set in the main thread only, as Python demands.

    The end of the launcher that started the process does, too: `composer` ends at SIGTERM without a word to its
    processes, which would train on and hold their GPUs.
    """
    global _caught
    _caught = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _catch) for number in SIGNALS}
    launched = "RANK" in os.environ  # not from a shell, whose end must not end what runs in its background
    if launched:
        _at_end_of_parent(signal.SIGTERM)
    try:
        yield
    finally:
        if launched:
            _at_end_of_parent(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        _caught = None


def _at_end_of_parent(number: int) -> None:
    """Ask Linux for a signal to this process when the thread that started it ends; 0: for none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _catch(number: int, frame: FrameType | None) -> None:
    global _caught
    name = signal.Signals(number).name
    if not _can_wait:
        if os.environ.get("RANK", "0") == "0":
            # No object of the interrupted code may be used here, such as a logger whose lock it holds.
            os.write(sys.__stdout__.fileno(), f"{name}: nothing to save; start it again to go on\n".encode())
        os._exit(EXIT_CODE)
    _caught = name
