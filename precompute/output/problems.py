"""Why an input shard could not be read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Why an input shard could not be read.

    Attributes:
        text: one line.
        outage: whether a store or server did not answer, so that the shard may be read later as it is.
    """

    text: str
    outage: bool = False

    def __str__(self) -> str:
        return self.text
