"""One line about how far a long job is."""

from __future__ import annotations

import sys
import time
from typing import TextIO


def duration(seconds: float) -> str:
    """1:02:03, 4:05 or 12s."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
    return f"{seconds // 60}:{seconds % 60:02d}" if seconds >= 60 else f"{seconds}s"


class Progress:
    """Pictures, rate and remaining time: rewritten in place on a terminal, else a line every ten seconds.

    Args:
        shards: shards to do.
        known: pictures a shard, where earlier shards tell; for the remaining time.
        quiet: print nothing (ranks other than the first).
    """

    def __init__(self, shards: int, known: float | None = None, quiet: bool = False, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.terminal = self.out.isatty()
        self.quiet = quiet
        self.shards, self.known = shards, known
        self.done_shards = self.done_in_shards = 0
        self.pictures = self.rejected = 0
        self.started = time.monotonic()
        self.printed = self.started

    def shard_done(self, samples: int) -> None:
        """Counts a finished shard and its samples, rejected ones included."""
        self.done_shards += 1
        self.done_in_shards += samples

    def update(self, pictures: int, rejected: int) -> None:
        """Counts a batch, and prints if it is time."""
        self.pictures += pictures
        self.rejected += rejected
        now = time.monotonic()
        if not self.quiet and now - self.printed >= (0.5 if self.terminal else 10.0):
            self.printed = now
            self._print(self.line())

    @property
    def rate(self) -> float:
        """Pictures a second since the start."""
        return self.pictures / max(1e-6, time.monotonic() - self.started)

    def line(self) -> str:
        """The line."""
        a_shard = self.done_in_shards / self.done_shards if self.done_shards else self.known
        left = "?"
        if a_shard is not None and self.pictures:
            samples = max(0.0, self.shards * a_shard - self.pictures - self.rejected)
            seconds = (time.monotonic() - self.started) / (self.pictures + self.rejected) * samples
            left = duration(seconds)
        return (
            f"encode: {self.pictures:,} pictures, shard {min(self.done_shards + 1, self.shards)}/{self.shards}, "
            f"{self.rate:,.1f} images/s, ETA {left}"
        )

    def _print(self, line: str) -> None:
        end, start = ("", "\r\033[K") if self.terminal else ("\n", "")
        print(start + line, end=end, file=self.out, flush=True)

    def close(self) -> None:
        """Leaves the terminal's line."""
        if self.terminal and not self.quiet and self.printed != self.started:
            print(file=self.out, flush=True)
