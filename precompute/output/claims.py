"""Which rank has begun an input shard, so that ranks that have finished their share go on with shards of others.

The shares of ranks are fixed, so one slow or lost machine would delay a whole job. A rank therefore makes a link
OUT/begun/<id> before it reads a shard, and a rank without work takes shards for which there is no such link, from the
ends of the shares of others. No process waits for another, and nothing depends on these links but the work that is
done twice: of two ranks that encode the same shard, the first one publishes it (`OutputSet.publish`).

A link, because it is made together with what it says, the number of the rank: another process of the same rank that
reads a part of the shard could find a file that is still empty. On file systems without links each rank does its share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice

from data.system.ranks import Rank
from precompute.output.output_set import BEGUN, UNREADABLE, OutputSet

LOST = 3600.0  # seconds without a sample after which a shard is another rank's to take: its process may be dead


def begun_shards(output: OutputSet) -> set[str]:
    """The shards of a set that ranks say they have begun."""
    try:
        return set(os.listdir(output.out / BEGUN))
    except FileNotFoundError:
        return set()


class Claims:
    """The shards of a set that ranks have begun.

    Args:
        output: of the set.
        rank: number of this process.
    """

    def __init__(self, output: OutputSet, rank: int) -> None:
        self._output = output
        self._folder = output.out / BEGUN
        self._rank = str(rank)
        self._share: set[str] = set()
        self._old_notes: dict[str, int] = {}
        self._kept: dict[str, float] = {}  # when links of shards were renewed, on this process's clock

    def forget(self, shards: Collection[str]) -> None:
        """At the start of the rank whose share has these shards. It does them itself, whoever had begun them: a process
        that was killed left its links here, and the number of ranks may have changed. What it had taken over before it
        was killed is free again. Notes of shards that could not be read are of an earlier start, unless they change."""
        self._share = set(shards)
        self._old_notes = self._notes()
        for shard in begun_shards(self._output):
            if shard in self._share or self._is_own(shard):
                self.release(shard)

    def take(self, shard: str) -> bool:
        """Begins a shard, unless another rank has begun or finished it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.symlink(self._rank, self._folder / shard)
        except FileExistsError:
            # It may have waited behind others that this rank took at the same time.
            return self._renew(shard)
        except OSError:  # of a full disk, for instance: what writes the shard will say so
            return shard in self._share
        if self._output.is_encoded(shard):  # it was published before its link here was removed
            self.release(shard)
            return False
        return True

    def keep(self, shards: Collection[str]) -> None:
        """Samples of these shards are written: those that this rank has begun are not lost, however long they take."""
        now = time.monotonic()
        for shard in shards:
            if now - self._kept.get(shard, -LOST) > LOST / 10:
                self._kept[shard] = now
                self._renew(shard)

    def release(self, shard: str) -> None:
        """This rank has finished a shard, or given it up."""
        self._kept.pop(shard, None)
        with suppress(OSError):
            (self._folder / shard).unlink()

    def free(self, tried: Collection[str]) -> list[str]:
        """Shards that no rank has begun or finished, the last ones first: ranks begin their shares with the first ones.

        Args:
            tried: shards that are left out. So are those that a rank could not read since this one started, unless they
                are of this rank's share: the other may have had no network.
        """
        new_notes = self._notes().items() - self._old_notes.items()
        left_out = {*tried, *({shard for shard, _ in new_notes} - self._share)}
        absent = [shard for shard in self._output.absent() if shard not in left_out]
        begun = begun_shards(self._output) & set(absent)
        lost = {shard for shard in begun if self._is_lost(shard)}
        for shard in lost:
            self.release(shard)
        return [shard for shard in reversed(absent) if shard not in begun - lost]

    def _notes(self) -> dict[str, int]:
        """When it was noted that a shard could not be read, in nanoseconds, by shard."""
        found = {}
        for path in (self._output.out / UNREADABLE).glob("*.json"):
            with suppress(FileNotFoundError):  # a rank tries it again
                found[path.stem] = path.stat().st_mtime_ns
        return found

    def _renew(self, shard: str) -> bool:
        """Whether this rank has begun a shard. As of now, if so."""
        own = self._is_own(shard)
        if own:
            with suppress(OSError):  # at worst, the shard is done twice
                os.utime(self._folder / shard, follow_symlinks=False)
        return own

    def _is_own(self, shard: str) -> bool:
        with suppress(OSError):  # its rank has finished it
            return os.readlink(self._folder / shard) == self._rank
        return False

    def _is_lost(self, shard: str) -> bool:
        with suppress(FileNotFoundError):
            return time.time() - (self._folder / shard).lstat().st_mtime > LOST
        return False


def shards_to_do(sets: Mapping[str, OutputSet], rank: Rank) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """The shards of a job that does one after the other: those of the rank's share, then those that no rank has begun.

    A shard is released when the next one is asked for. A rank that is alone does all that are not done. Notes of shards
    of its share that could not be read are removed, as they are tried again.

    Args:
        sets: by label.
        rank: of this process.

    Yields:
        The label of a set, the id of a shard, and a function to call while the shard is done, however often: without a
        call for an hour, other ranks take this one for dead.
    """
    claims = {label: Claims(output, rank.rank) for label, output in sets.items()}
    left = rank.share([(label, shard) for label, output in sets.items() for shard in output.shards])
    for label, claim in claims.items():
        mine = {shard for other, shard in left if other == label}
        sets[label].forget_unreadable(mine)
        claim.forget(mine)
    tried: dict[str, set[str]] = {label: set() for label in sets}
    while True:
        for label, shard in left:
            if sets[label].is_done(shard) or (rank.world > 1 and not claims[label].take(shard)):
                continue
            tried[label].add(shard)
            try:
                yield label, shard, partial(claims[label].keep, [shard])
            finally:
                claims[label].release(shard)
        # Alone, a rank has tried all.
        free = (
            [] if rank.world == 1 else [(label, shard) for label in sets for shard in claims[label].free(tried[label])]
        )
        # A part of them, since other ranks end as well; and these may have taken the first ones meanwhile.
        taken = (one for one in free if claims[one[0]].take(one[1]))
        left = list(islice(taken, max(1, len(free) // (2 * rank.world))))
        if not left:
            return
