"""Which samples processes died of that decoded them, in a file, for the next start of a job or a run.

Where a process has no workers that decode, it dies itself. While a sample is read and decoded, its number is in a file
that is mapped into memory, whose contents stay when the process dies. Python's faulthandler says in another file
whether it died of a fatal signal of its own making, such as SIGSEGV, and in which function. A process that is killed
from outside, by SIGKILL or by a signal that it can handle, writes nothing there, and blames no sample.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data.sources.base import InputShard, Position
from data.system.disk_errors import about
from data.system.log import every_rank
from data.workers.deaths import DecoderDied

CRASHES = "crashes.jsonl"  # one line per death of a process that decoded
PLACE_BYTES = 1 << 16  # more than the longest names of shards and keys take
LONGEST_KEY = 1000  # characters


class CrashLog:
    """The deaths of processes that decode, over all starts of a job or run.

    Args:
        folder: of its output.
        name: of this process, which no other one has that runs at the same time.
        decoding: end of the name of a file that is in the stack of a process which reads or decodes a sample.
    """

    def __init__(self, folder: Path, name: str, decoding: str) -> None:
        self.file = folder / CRASHES
        self._place_file = folder / f".place-{name}"
        self._fault_file = folder / f".fault-{name}"
        self._decoding = decoding
        self._place: mmap.mmap | None = None
        self._fault: BinaryIO | None = None

    def find(self) -> None:
        """Note the death of this process's predecessor, if it died of a sample."""
        try:
            fault = self._fault_file.read_text(encoding="utf-8", errors="replace")
            place = json.loads(self._place_file.read_bytes().split(b"\0")[0])
        except (FileNotFoundError, ValueError):
            pass
        else:
            if self._decoding in fault:
                self._append([{**place, "reason": fault.splitlines()[0]}])
        self._fault_file.unlink(missing_ok=True)
        self._place_file.unlink(missing_ok=True)

    def deaths(self) -> list[DecoderDied]:
        """All that are noted, of any process."""
        found = []
        for line in self.file.read_text("utf-8", "replace").splitlines() if self.file.is_file() else []:
            try:
                death = json.loads(line)
                shard = InputShard(str(death["label"]), str(death["shard"]))
                position = Position(shard, int(death["sample"]), str(death.get("key", "")))
                found.append(DecoderDied(str(death["reason"]), [position]))
            except (ValueError, KeyError, TypeError, AttributeError):
                every_rank.warning(f"{self.file}: a line that names no sample, of a full disk maybe: {line[:100]}")
        return found

    def add(self, death: DecoderDied) -> None:
        """Note the death of a worker process."""
        self._append([{**_where(p.shard, p.number, p.key), "reason": death.reason} for p in death.positions])

    def _append(self, deaths: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with about(self.file), open(self.file, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(death) + "\n" for death in deaths))

    # --- in the process that decodes ----------------------------------------------------------------------

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which `mark` notes what is decoded, so that `find` finds a death at the next start."""
        self.open()
        try:
            with self.watched():
                yield
        finally:
            self.close()

    def open(self) -> None:
        """Open the files into which `mark` and faulthandler write, unless they are open."""
        if self._place is not None:
            return
        self._place_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with about(self._place_file):
                self._place_file.write_bytes(bytes(PLACE_BYTES))
        except OSError:
            self._place_file.unlink(missing_ok=True)
            raise
        with open(self._place_file, "r+b") as place:
            self._place = mmap.mmap(place.fileno(), PLACE_BYTES)
        self._fault = open(self._fault_file, "wb")  # noqa: SIM115 - `close` closes it

    def close(self) -> None:
        """Close and remove them."""
        if self._place is not None:
            self._place.close()
            self._fault.close()
            self._place = None
            self._place_file.unlink(missing_ok=True)
            self._fault_file.unlink(missing_ok=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which faulthandler writes into the file."""
        was_on = faulthandler.is_enabled()
        faulthandler.enable(self._fault, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()
            if was_on:
                faulthandler.enable(sys.__stderr__)

    def mark(self, shard: InputShard, number: int, key: str = "") -> None:
        """This process begins to read a sample, or, where it says its key, to decode it."""
        if self._place is not None:
            text = json.dumps(_where(shard, number, key)).encode()
            self._place[: len(text) + 1] = text + b"\0"


def _where(shard: InputShard, number: int, key: str) -> dict[str, Any]:
    return {"label": shard.label, "shard": shard.shard, "sample": number, "key": key[:LONGEST_KEY]}
