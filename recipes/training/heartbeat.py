"""Until when the processes that train here count as well: one file each, for a health check from outside.

`cluster/health.py` reads the files that the watchdog writes. They are in the folder that the environment variable
PRECOMPOSE_HEARTBEATS names, as in the image of the Dockerfile; without it nothing is written.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from data.system.log import say

VARIABLE = "PRECOMPOSE_HEARTBEATS"


class Heartbeat(NamedTuple):
    """The last sign of life of a process that trains.

    Attributes:
        process: its number.
        until: when it no longer counts as well, unless it says otherwise before: of `time.monotonic`, in seconds, which
            all processes of a machine share.
        hook: the last one that was called, of `recipes.training.hooks.Hooks`, or "start".
        on_gpu: whether it trains on a GPU, of which it has one.
    """

    process: int
    until: float
    hook: str
    on_gpu: bool


class HeartbeatFile:
    """The file of this process."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._path = Path(folder) / str(os.getpid()) if folder else None
        self._start = _start_of(os.getpid())

    def write(self, until: float, hook: str, on_gpu: bool) -> None:
        """Replace the file. Training goes on where that cannot be done, and one line says so."""
        if self._path is None:
            return
        text = json.dumps({"start": self._start, "until": until, "hook": hook, "on_gpu": on_gpu})
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not data.system.files.write_text, which waits for the disk: the file need not outlive the machine.
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            say(f"{VARIABLE}: {self._path.parent}: {error.strerror}: a health check will not see this run")
            for path in (partial, self._path):  # from its last sign of life, the check would take it for hung
                with suppress(OSError):
                    path.unlink()
            self._path = None

    def remove(self) -> None:
        """Leave no file behind."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeats of all processes that still run. Files that killed processes have left are ignored."""
    found = []
    for path in folder.glob("[0-9]*"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # the process has ended meanwhile
            continue
        number = int(path.name)
        # A container that is started again keeps its files, and gives the numbers of processes anew.
        if _start_of(number) == values.pop("start"):
            found.append(Heartbeat(number, **values))
    return sorted(found)


def _start_of(process: int) -> int | None:
    """The time at which a process started, in the kernel's ticks since the machine was started; None: it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *numbers = text.rpartition(")")[2].split()  # the name before it may have spaces
    return None if state in "ZX" else int(numbers[18])
