"""Which sample a job died of that decodes in its own process (`workers: 0`), for its next start.

While a sample is read and decoded, its number is in a file that is mapped into memory, whose contents stay when the
process dies. Python's faulthandler says in another file whether it died of a fatal signal of its own making, such as
SIGSEGV, and in which function. A process that is killed from outside, by SIGKILL or by a signal that it can handle,
writes nothing there, and blames no sample.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from precompute.batch import InputShard, Position
from precompute.decode import DecoderDied

CRASHES = "crashes.jsonl"  # one line per death of a process that decoded
PLACE_BYTES = 1 << 16  # more than the longest names of shards take
DECODING = "precompute/decode.py"  # in the stack of a process that died while it read or decoded a sample


class Crashes:
    """The deaths of one rank's processes, over all starts of a job.

    Args:
        folder: of the job's output.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / CRASHES
        self._place = folder / f".place-{rank}"
        self._fault = folder / f".fault-{rank}"
        self._shard: InputShard | None = None
        self._memory: mmap.mmap | None = None

    def deaths(self) -> list[DecoderDied]:
        """All that were found until now, of any rank, and that of this rank's last process, if it died of a sample."""
        self._find()
        found = []
        for line in self._file.read_text(encoding="utf-8").splitlines() if self._file.is_file() else []:
            death = json.loads(line)
            position = Position(InputShard(death["label"], death["shard"]), death["sample"])
            found.append(DecoderDied(death["reason"], [position]))
        return found

    def _find(self) -> None:
        try:
            fault = self._fault.read_text(encoding="utf-8", errors="replace")
            place = json.loads(self._place.read_bytes().split(b"\0")[0])
        except (FileNotFoundError, ValueError):
            return
        if DECODING in fault:
            death = {**place, "reason": fault.splitlines()[0]}
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(death) + "\n")
        self._fault.unlink()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, `mark` notes what is decoded, and a death is noted, too."""
        self._place.write_bytes(bytes(PLACE_BYTES))
        was_on = faulthandler.is_enabled()
        with open(self._place, "r+b") as place, open(self._fault, "wb") as fault:
            self._memory = mmap.mmap(place.fileno(), PLACE_BYTES)
            faulthandler.enable(fault, all_threads=False)
            try:
                yield
            finally:
                faulthandler.disable()
                if was_on:
                    faulthandler.enable(sys.__stderr__)
                self._memory.close()
                self._memory = None
                self._place.unlink()
                self._fault.unlink()

    def mark(self, shard: InputShard, number: int) -> None:
        """This process begins to read and decode a sample."""
        if self._memory is not None:
            text = json.dumps({"label": shard.label, "shard": shard.shard, "sample": number}).encode()
            self._memory[: len(text) + 1] = text + b"\0"
