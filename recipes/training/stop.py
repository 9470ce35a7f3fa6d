"""Signals that ask a run to stop: it saves a checkpoint at the end of the batch, and exits with a code of its own.

SIGTERM is what launchers, clusters and containers send before they kill; SIGUSR1 is what SLURM sends ahead of a time
limit (`--signal=USR1@120`); SIGINT is Ctrl-C, which a terminal sends to the launcher, to all of its ranks and to their
data workers. The exit code tells a script apart from success and from errors: start the same command again, and it goes
on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from data.system.helper_process import end_with_parent
from data.system.log import say

EXIT_CODE = 85  # "start me again": unused by shells, by Python and by launchers
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Seconds for threads and processes of components to end after the run: what they still upload must not be lost, but a
# job that is to be started again must end before its scheduler kills it.
PATIENCE, PATIENCE_TO_START_AGAIN = 600.0, 60.0
SAID_AFTER = 2.0  # seconds until a line says which are left: idle pools of threads end at once
INTERRUPTED = 130  # what shells make of SIGINT
NO_SIGNAL = 0  # no signal has this number

_caught: str | None = None
_in_batches = False
_stopped = False
_parent = os.getppid()  # now, as packages are imported after this one for seconds
_handlers: dict[signal.Signals, Any] = {}  # of the present `stop_signals`


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


def stopped() -> bool:
    """Whether `StartAgain` has ended the run, and with it the last `stop_signals`."""
    return _stopped


def begin_batches() -> None:
    """Let signals wait for the end of a batch, where the run looks at `requested`, until `stop_signals` ends.

    Before it, a signal ends the process at once, since there is nothing to save. Call it when every rank trains its
    first batch: those that would wait for it alone might wait for ranks that have ended.
    """
    global _in_batches
    if not _in_batches:
        catch_again()  # libraries that components use set handlers of their own, such as ones that end the process
    _in_batches = True


def catch_again() -> None:
    """Set the handlers of `stop_signals` once more, after an import of Composer. It sets handlers that end the process
    with other statuses, also where SIGINT is ignored."""
    for number, handler in _handlers.items():
        signal.signal(number, handler)


@contextmanager
def stop_signals() -> Iterator[None]:
    """A context in which `SIGNALS` ask the process to stop, for the main thread.

    The end of the launcher that started the process does, too: `composer` ends at SIGUSR1, or at a second SIGTERM,
    without a word to its processes, which would train on and hold their GPUs.

    A second Ctrl-C ends a process that no launcher has started at once. Launchers pass on the first one, so that ranks
    get it twice, and end their ranks themselves at the second. A process whose SIGINT is ignored, as a shell does for
    what it runs in the background, goes on ignoring it.

    After `StartAgain` the process ignores them until it has ended: launchers send SIGTERM to all when the first one has
    ended, and the status of the others must be the same.
    """
    global _caught, _in_batches, _stopped, _handlers
    _caught, _in_batches, _stopped = None, False, False
    numbers, write_end = os.pipe()
    os.set_blocking(write_end, False)
    launched = "RANK" in os.environ  # not from a shell, whose end must not end what runs in its background
    watcher = threading.Thread(target=_end_at_once, args=(numbers, launched), name="stop-signals", daemon=True)
    watcher.start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _handlers = dict.fromkeys(SIGNALS, _catch)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        _handlers[signal.SIGINT] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in _handlers.items()}
    if launched:
        end_with_parent(signal.SIGTERM)
        if os.getppid() != _parent:  # it has ended before
            os.kill(os.getpid(), signal.SIGTERM)
    try:
        yield
    except StartAgain:
        _stopped = True
        before = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise
    finally:
        if launched:
            end_with_parent(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(write_end, bytes([NO_SIGNAL]))
        watcher.join()  # it has read all signals
        os.close(write_end)
        _caught, _in_batches, _handlers = None, False, {}


@contextmanager
def ends() -> Iterator[None]:
    """A context of all that a process does. It ends the process if that has not ended `PATIENCE` later, with the status
    that it was to have: of a normal end or of an error, or sooner after `StartAgain`.

    Python waits for threads and processes that are not daemons, such as a component's that work in an endless loop. A
    run all of whose results are written would hold its machines to the time limit of its job. After `StartAgain`,
    which ignores signals, nothing but SIGKILL would end the wait.
    """
    status = 1  # of an error, whose traceback Python prints before it waits
    patience = PATIENCE
    try:
        yield
        status = 0
    except SystemExit as error:
        patience = PATIENCE_TO_START_AGAIN if isinstance(error, StartAgain) else PATIENCE
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        status = INTERRUPTED
        raise
    finally:
        threading.Thread(target=_end_late, args=[status, patience], name="end-late", daemon=True).start()


def _end_late(status: int, patience: float) -> None:
    time.sleep(SAID_AFTER)
    if left := _left():
        say(f"the run has ended and waits up to {patience:g} s for {', '.join(left)}, which a component has started")
    time.sleep(patience - SAID_AFTER)
    while not (left := _left()):
        time.sleep(patience)
    for child in multiprocessing.active_children():
        child.kill()  # their handlers of other signals may be those of this process
    say(
        f"ended although {', '.join(left)} still ran {patience:g} s after the run: end threads and processes of "
        "components, or start them with daemon=True"
    )
    if sys.stdout is not None:
        with suppress(OSError):
            sys.stdout.flush()
    os._exit(status)


def _left() -> list[str]:
    """The threads and processes that the end of this process waits for."""
    threads = [one.name for one in threading.enumerate() if not (one.daemon or one is threading.main_thread())]
    children = [one.name for one in multiprocessing.active_children() if not one.daemon]
    return [*(f"the thread {name}" for name in threads), *(f"the process {name}" for name in children)]


def _catch(number: int, frame: FrameType | None) -> None:
    _note(number)


def _note(number: int) -> None:
    global _caught
    _caught = _caught or signal.Signals(number).name  # after Ctrl-C, `composer` sends SIGTERM


def _end_at_once(numbers: int, launched: bool) -> None:
    """Note signals. End the process at one before its first batch, and at a second Ctrl-C.

    This is a thread's work: handlers run between two lines of Python in the main thread, which may wait in C++ for
    minutes, such as for ranks that have ended.

    Args:
        numbers: file from which the numbers of this process's signals are read, one byte each, up to `NO_SIGNAL`.
        launched: whether a launcher has started the process.
    """
    pressed = 0
    with open(numbers, "rb", buffering=0) as file:
        while (number := file.read(1)[0]) != NO_SIGNAL:
            if number in SIGNALS and signal.getsignal(number) is not _catch:
                _note(number)  # a component has set another handler since the first batch
            if number in SIGNALS and not _in_batches:
                _say(f"{signal.Signals(number).name}: nothing to save; start it again to go on")
                os._exit(EXIT_CODE)
            if number == signal.SIGINT and not launched:
                pressed += 1
                if pressed > 1:
                    _say("SIGINT: ended without a checkpoint")
                    os._exit(INTERRUPTED)
                _say("SIGINT: ends after this batch; a second one ends it at once")


def _say(line: str) -> None:
    """Print a line on the first rank."""
    if os.environ.get("RANK", "0") == "0" and sys.__stdout__ is not None:  # None: started without one (>&-)
        say(line, sys.__stdout__.fileno())


def _leave_to_parent() -> None:
    """In a process that was forked: its signals must not be written into its parent's file."""
    global _parent
    _parent = os.getppid()
    if signal.getsignal(SIGNALS[0]) is _catch:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_parent)
