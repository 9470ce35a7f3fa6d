"""Ctrl-C while processes are forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_after_forks() -> Iterator[None]:
    """Inside, processes are forked. An interrupt (SIGINT) of this process is handled at the end.

    Around a fork Python calls functions, such as the one that releases the lock of logging, and goes on after an error
    in them. An interrupt that came during a fork would be lost there, with the lock held: the process would take its
    workers, which got it too, for dead, or wait for ever.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    process, heard = os.getpid(), []

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            heard.append(number)
        elif callable(before):  # in a forked process
            before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
