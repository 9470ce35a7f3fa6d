"""Samples and input shards that are left out because processes die of them, so that one of them does not end a job."""

from __future__ import annotations

from collections import Counter

from precompute.batch import InputShard, Position
from precompute.decode import DecoderDied, died
from precompute.ranks import every_rank

LIMIT = 16  # deaths in a row without an image that was encoded; then the cause is another


class Quarantine:
    """Counts the deaths of decoding processes by what they were at.

    A sample of which two processes died is rejected as `kills_decoder`. A shard in which processes go on to die at a
    rejected sample kills the process that reads it, and is given up.

    Attributes:
        killers: samples to reject.
    """

    def __init__(self) -> None:
        self.killers: set[Position] = set()
        self._deaths: Counter[Position] = Counter()
        self._in_a_row = 0
        self._encoded = -1

    def add(self, death: DecoderDied, encoded: int) -> dict[InputShard, str]:
        """Takes the death of worker processes.

        Args:
            death: of processes.
            encoded: number of images that were encoded by now.

        Returns:
            Shards to give up, each with a reason.

        Raises:
            ValueError: too many deaths in a row, or one that is not known to be of a sample.
        """
        self._in_a_row = 1 if encoded != self._encoded else self._in_a_row + 1
        self._encoded = encoded
        if self._in_a_row > LIMIT or not death.positions:
            raise died(death.reason) from death
        given_up = {}
        for position in death.positions:
            self._deaths[position] += 1
            where = f"sample {position.number} of {position.shard.shard}"
            if position in self.killers:
                given_up[position.shard] = f"processes that read it die at {where}"
            elif self._deaths[position] == 2:
                self.killers.add(position)
                every_rank.warning(f"encode: {death.reason} again at {where}: rejected as kills_decoder")
            else:
                every_rank.warning(f"encode: {death.reason} at {where}: trying again")
        return given_up
