"""The input shards of one rank of an encode job: which it does, and what happens to each until it is published."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from data.sources.base import InputShard
from data.system.log import every_rank
from data.system.ranks import Rank
from precompute.output.claims import Claims
from precompute.output.output_set import OutputSet
from precompute.output.problems import Problem
from precompute.output.upload import Uploads


class RankShards:
    """A rank's share of all input shards and, where ranks take over from each other, those that no rank has begun.

    Args:
        sets: by label.
        rank: of this process.
        take_over: whether this rank goes on with shards of others when its share is done.
        at_once: number of shards that are read at the same time, so that it takes as many at least.

    Attributes:
        all: the shards of the whole job.
        own: those of this rank's share.
    """

    def __init__(self, sets: dict[str, OutputSet], rank: Rank, take_over: bool, at_once: int = 1) -> None:
        self.all = [InputShard(label, shard) for label, output in sets.items() for shard in output.shards]
        self.own = rank.share(self.all)
        self._sets, self._rank, self._take_over, self._at_once = sets, rank, take_over, at_once
        self._claims = {label: Claims(output, rank.rank) for label, output in sets.items()}
        self._tried: set[InputShard] = set()

    def forget_earlier_starts(self) -> None:
        """Removes the notes of shards of this rank's share that could not be read, and says that none is begun.

        Tasks of an array may start hours apart, so the age of a note says nothing. A note counts until the rank that
        has the shard in its share starts again; whatever the number of ranks, there is one. It removes the note first
        of all: of ranks that start together, none looks at the notes before it has loaded the encoders. Where a rank
        starts much later than the others, these may name a shard that it is still to try. It completes the set all the
        same.
        """
        for label, output in self._sets.items():
            mine = {shard.shard for shard in self.own if shard.label == label}
            output.forget_unreadable(mine)
            self._claims[label].forget(mine)

    def left(self) -> list[InputShard]:
        """The shards of this rank's share that are not encoded yet."""
        return [shard for shard in self.own if not self._sets[shard.label].is_encoded(shard.shard)]

    def begin(self, shard: InputShard) -> bool:
        """Whether this rank is to do a shard: False where another one has begun or finished it."""
        return not self._take_over or self._claims[shard.label].take(shard.shard)

    def keep(self, written: Collection[InputShard]) -> None:
        """Samples of these shards are written, so that no other rank takes this one for lost."""
        if self._take_over:
            for label, claim in self._claims.items():
                claim.keep([shard.shard for shard in written if shard.label == label])

    def publish(self, shard: InputShard, uploads: Uploads) -> None:
        """The folder of a shard is complete: it gets its name, and its files are uploaded."""
        self._sets[shard.label].publish(shard.shard, self._rank.rank)
        self._release(shard)
        self._upload(shard, uploads)

    def upload_rest(self, uploads: Uploads) -> None:
        """Uploads what earlier starts have encoded, and not uploaded: they made no copy, or were ended before."""
        for shard in self.own:
            output = self._sets[shard.label]
            if output.is_encoded(shard.shard) and not output.is_done(shard.shard):
                self._upload(shard, uploads)

    def give_up(self, shard: InputShard, problem: Problem) -> None:
        """A shard could not be read."""
        self._sets[shard.label].note_unreadable(shard.shard, problem)
        self._release(shard)

    def take_more(self, failed: Collection[InputShard]) -> list[InputShard]:
        """Begins shards that no rank has begun: a part of them, since others end as well. They are of other ranks, or
        this one's that another rank had begun and gave up. None where ranks do not take over.

        Args:
            failed: shards that this rank could not read.
        """
        if not self._take_over:
            return []
        left_out = {*self._tried, *failed}
        free = [
            InputShard(label, shard)
            for label, claim in self._claims.items()
            for shard in claim.free({one.shard for one in left_out if one.label == label})
        ]
        # Others may have taken the first of them meanwhile, and those behind them are still free.
        number = max(1, self._at_once, len(free) // (2 * self._rank.world))
        taken = list(islice(filter(self.begin, free), number))
        self._tried.update(taken)
        if free:
            every_rank.info(f"encode: rank {self._rank.rank} takes over {len(taken)} of {len(free)} shards")
        return taken

    def _release(self, shard: InputShard) -> None:
        if self._take_over:
            self._claims[shard.label].release(shard.shard)

    def _upload(self, shard: InputShard, uploads: Uploads) -> None:
        if (files := self._sets[shard.label].to_upload(shard.shard)) is not None:
            uploads.add(files)
