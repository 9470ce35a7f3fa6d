"""The line that reports the progress of an encode job."""

from __future__ import annotations

import sys
import time


def duration(seconds: float) -> str:
    """Seconds as text: 1:02:03, 4:05 or 12s."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
    return f"{seconds // 60}:{seconds % 60:02d}" if seconds >= 60 else f"{seconds}s"


class EncodeProgress:
    """Counts images and shards, and prints rate and remaining time.

    On a terminal the line is rewritten in place twice per second; elsewhere a new line is printed every ten seconds.

    Args:
        shards: number of shards to do.
        samples_per_shard: for the remaining time, until the first shard is done; None where nothing is known.
        quiet: print nothing (for ranks other than the first).
    """

    def __init__(self, shards: int, samples_per_shard: float | None = None, quiet: bool = False) -> None:
        self.terminal = sys.stdout.isatty()
        self.quiet = quiet
        self.shards, self.samples_per_shard = shards, samples_per_shard
        self.done_shards = self.done_in_shards = 0
        self.images = self.rejected = 0
        self.started = time.monotonic()
        self.printed = self.started

    def shard_done(self, samples: int) -> None:
        """Counts a finished shard and its samples, rejected ones included."""
        self.done_shards += 1
        self.done_in_shards += samples

    def update(self, images: int, rejected: int) -> None:
        """Counts a batch, and prints the line if it is time."""
        self.images += images
        self.rejected += rejected
        now = time.monotonic()
        if not self.quiet and now - self.printed >= (0.5 if self.terminal else 10.0):
            self.printed = now
            self._print(self.line())

    @property
    def rate(self) -> float:
        """Images per second since the start."""
        return self.images / max(1e-6, time.monotonic() - self.started)

    def line(self) -> str:
        """The line, such as "encode: 95 images, shard 2/4, 4.8 images/s, ETA 1:00"."""
        per_shard = self.done_in_shards / self.done_shards if self.done_shards else self.samples_per_shard
        left = "?"
        if per_shard is not None and self.images:
            samples = max(0.0, self.shards * per_shard - self.images - self.rejected)
            seconds = (time.monotonic() - self.started) / (self.images + self.rejected) * samples
            left = duration(seconds)
        return (
            f"encode: {self.images:,} images, shard {min(self.done_shards + 1, self.shards)}/{self.shards}, "
            f"{self.rate:,.1f} images/s, ETA {left}"
        )

    def _print(self, line: str) -> None:
        end, start = ("", "\r\033[K") if self.terminal else ("\n", "")
        print(start + line, end=end, flush=True)

    def close(self) -> None:
        """Ends the line on a terminal."""
        if self.terminal and not self.quiet and self.printed != self.started:
            print(flush=True)
