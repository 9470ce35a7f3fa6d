"""Samples and input shards that are left out because processes die of them, so that one of them does not end a job."""

from __future__ import annotations

from collections import Counter

from data.sources.base import InputShard, Position
from data.system.log import every_rank
from data.workers.deaths import DecoderDied, died

LIMIT = 16  # deaths in a row without an image that came through; then the cause is another


class Quarantine:
    """Counts the deaths of decoding processes by what they were at.

    A sample of which two processes died is rejected as `kills_decoder`. A shard in which processes go on to die at a
    rejected sample kills the process that reads it, and is given up.

    Args:
        name: of what decodes, with which its messages begin.

    Attributes:
        killers: samples to reject.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.killers: set[Position] = set()
        self._deaths: Counter[Position] = Counter()
        self._in_a_row = 0
        self._passed = -1

    def add(self, death: DecoderDied, passed: int) -> dict[InputShard, str]:
        """Takes the death of processes.

        Args:
            death: of processes.
            passed: number of images, or of batches, that came through by now.

        Returns:
            Shards to give up, each with a reason.

        Raises:
            ValueError: too many deaths in a row, or one that is not known to be of a sample.
        """
        self._in_a_row = 1 if passed != self._passed else self._in_a_row + 1
        self._passed = passed
        if self._in_a_row > LIMIT or not death.positions:
            raise died(death.reason) from death
        given_up = {}
        for position in death.positions:
            self._deaths[position] += 1
            key = f" ({position.key})" if position.key else ""
            where = f"sample {position.number}{key} of {position.shard.shard}"
            if position in self.killers:
                if not position.key:  # it is not decoded any more, so reading it is the cause
                    given_up[position.shard] = f"processes that read it die at {where}"
            elif self._deaths[position] == 2:
                self.killers.add(position)
                every_rank.warning(f"{self.name}: {death.reason} again at {where}: rejected as kills_decoder")
            else:
                every_rank.warning(f"{self.name}: {death.reason} at {where}: trying again")
        return given_up
