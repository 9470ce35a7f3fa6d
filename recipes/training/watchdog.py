"""Says where a run waits that does not go on: on which rank, after which batch, and in which call.

A collective that one rank never reaches, a data worker that waits for a shard, a file system that does not answer:
each leaves a run that does nothing and says nothing, until a time limit ends it with a message about another rank.
The ranks whose call is a collective wait for the one whose call is not.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from data.system.files import write_text
from data.system.log import say
from data.workers.stacks import keep_stacks, stacks_of_workers
from recipes.training.heartbeat import HeartbeatFile

if TYPE_CHECKING:
    from recipes.training.run import Run

EXIT_CODE = 86  # a run that hung was ended
FOLDER = "stacks"  # in the folder of the run
GRACE = 10.0  # seconds between the report and the end, in which other ranks report
ROOT = Path(__file__).resolve().parents[2]
# Hooks after which a run soon comes to the next one. After others it may export, draw, save a checkpoint or validate.
QUICK = frozenset(
    ("before_data", "batch_start", "before_passes", "before_forward", "after_forward", "before_backward")
    + ("after_backward", "unscale_gradients", "average_gradients", "clip_gradients", "before_step")
)
BUILDING = frozenset(("check_machine", "change_modules", "shard"))  # in which Composer has no clock yet
LONG = 3600.0  # seconds that a run may take after other hooks, before it counts as hung
# What paths of installed packages and of Python's own files begin with.
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib/python[\d.]+)/")


class Progress(NamedTuple):
    """The last sign of life of this process.

    Attributes:
        time: of `time.monotonic`, in seconds.
        hook: of `recipes.training.hooks.Hooks`, or "start".
        run: says which batch it was; None before there is a run.
    """

    time: float
    hook: str
    run: Run | None


_last = Progress(0.0, "start", None)
_stepped = False  # whether the first batch is done, which may have compiled the model


def alive(hook: str, run: Run | None) -> None:
    """This process goes on. `recipes.training.levers.Levers` says so before each hook."""
    global _last, _stepped
    _last = Progress(time.monotonic(), hook, run)
    _stepped = hook != "start" and (_stepped or hook == "step_end")


def hung_at(last: Progress, stepped: bool, seconds: float) -> float:
    """The time from which on a process counts as hung if there is no further sign of life.

    Args:
        last: its last sign of life.
        stepped: whether it has completed a batch since it started.
        seconds: of silence that are usual at most within a batch.
    """
    quick = stepped and last.hook in QUICK
    return last.time + (seconds if quick else max(seconds, LONG))


def well_until(last: Progress, stepped: bool, now: float, seconds: float) -> float:
    """The time until which a process counts as well if there is no further sign of life.

    Args:
        last: see `hung_at`.
        stepped: see `hung_at`.
        now: when its watchdog last ran. A process that is stopped has none that does.
        seconds: see `hung_at`.
    """
    return min(hung_at(last, stepped, seconds), now + seconds)


@contextmanager
def watched(seconds: float | None, output: str | Path, ends: bool = False) -> Iterator[None]:
    """A context in which a thread reports where the main thread waits when there was no sign of life for a while.

    It prints one line, whatever the rank, and writes the stacks of all threads and data workers to
    `<output>/stacks/rank-<rank>.txt`. If the run goes on, there is another line. Code in C that neither returns nor
    gives up Python's lock stops that thread, too: then faulthandler writes all stacks to standard error, after twice
    the time. The thread also tells a health check until when this process counts as well (`well_until`).

    Args:
        seconds: without a sign of life; None: nothing is watched.
        output: folder of the run.
        ends: whether the process then exits with `EXIT_CODE`.
    """
    if seconds is None:
        yield
        return
    alive("start", None)
    keep_stacks()  # before data workers are forked
    done, heartbeat = threading.Event(), HeartbeatFile()
    arguments = (done, seconds, Path(output), ends, heartbeat)
    thread = threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        heartbeat.remove()
        faulthandler.cancel_dump_traceback_later()


def _watch(done: threading.Event, seconds: float, output: Path, ends: bool, heartbeat: HeartbeatFile) -> None:
    rank = int(os.environ.get("RANK") or 0)
    file = output / FOLDER / f"rank-{rank}.txt"
    reported: Progress | None = None
    while not done.wait(min(5.0, seconds / 4)):
        faulthandler.dump_traceback_later(2 * seconds, exit=ends, file=2)
        stepped, last, now = _stepped, _last, time.monotonic()  # in this order: "start" has no run
        silent = now - last.time
        # The run has its device when it has done a batch.
        heartbeat.write(well_until(last, stepped, now, seconds), last.hook, stepped and last.run.on_gpu)
        if reported is not None and last is reported:
            # After the report, since the other ranks report, too.
            if ends and now > hung_at(last, stepped, seconds) + GRACE:
                say(f"rank {rank}: ended by training.watchdog_ends; start again to go on from the newest checkpoint")
                os._exit(EXIT_CODE)
            continue
        if reported is not None:
            say(f"rank {rank}: goes on after {last.time - reported.time:.0f} s")
            reported = None
        if silent <= seconds:
            continue
        reported = last
        stacks = {number: stack_of(frame) for number, frame in sys._current_frames().items()}
        where = calls(stacks[threading.main_thread().ident])
        workers = stacks_of_workers()
        workers_at = sorted({innermost(text) for text in workers.values()})
        say(
            f"rank {rank}: no progress for {silent:.0f} s since {position(last)}: waits in {where}"
            + (f"; its data workers in {', '.join(workers_at)}" if workers_at else "")
            + f"; all stacks: {file}"
        )
        # A thread of its own, as the run may wait for a file system that does not answer, and this thread must live: it
        # ends the run, and tells a health check that the process goes on.
        threading.Thread(target=_write, args=(rank, file, stacks, workers), name="stacks", daemon=True).start()


def stack_of(frame: FrameType) -> traceback.StackSummary:
    """The calls that led to a frame, the innermost last. The files with their lines are read when it is formatted."""
    found = [
        traceback.FrameSummary(outer.f_code.co_filename, line, outer.f_code.co_name, lookup_line=False)
        for outer, line in traceback.walk_stack(frame)
    ]
    return traceback.StackSummary.from_list(found[::-1])


def position(last: Progress) -> str:
    """Where a run was at its last sign of life, in words."""
    if last.run is None:
        return "its start"
    if last.hook in BUILDING:
        return f"{last.hook} at its start"
    return f"{last.hook} after batch {last.run.clock.batch}"


def calls(stack: traceback.StackSummary) -> str:
    """The innermost call of a stack, and the innermost two calls of this repository that led to it."""
    shown = [frame for frame in stack if _is_ours(frame.filename)][-2:]
    if stack[-1] not in shown:
        shown.append(stack[-1])
    return " > ".join(_call(frame.filename, frame.lineno, frame.name) for frame in shown)


def innermost(text: str) -> str:
    """The innermost call of the thread that faulthandler wrote last, which got the signal."""
    match = re.search(r'Current thread .*\n  File "(.*)", line (\d+) in (.*)', text)
    return "an unknown call" if match is None else _call(match[1], int(match[2]), match[3])


def _call(file: str, line: int | None, name: str) -> str:
    short = Path(file).relative_to(ROOT) if _is_ours(file) else _INSTALLED.sub("", file)
    return f"{short}:{line} {name}"


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(ROOT) and not _INSTALLED.match(file)


def _write(rank: int, file: Path, stacks: dict[int, traceback.StackSummary], workers: dict[int, str]) -> None:
    """Write the stacks of threads and of data workers, by the numbers of both."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"thread {names.get(number, number)}:\n{''.join(stack.format())}" for number, stack in stacks.items()]
    parts += [f"data worker {process}, innermost call first:\n{text}" for process, text in workers.items()]
    try:
        write_text(file, "\n".join(parts))
    except OSError as error:
        say(f"rank {rank}: {file} could not be written ({error.strerror})")
