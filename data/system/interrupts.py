"""Ctrl-C while processes are forked, and where a component of one's own catches it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_heard = False


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Inside, an interrupt (SIGINT) raises KeyboardInterrupt as ever, and is noted for `raise_lost_interrupt`."""
    global _heard
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _heard = False
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        _heard = False
        if signal.getsignal(signal.SIGINT) is _note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _note(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt again where something has caught it, such as a bare `except:` in a source of one's own.

    The job would go on, and take the sample that was being read for a broken one, or the shard to end there.
    """
    if _heard:
        raise KeyboardInterrupt


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
