"""Finds the pictures that kill the processes that decode them, and leaves them out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import distributed
from torch.utils.data import get_worker_info

from data.sources.base import InputShard, Position
from data.workers.crash_log import CrashLog
from data.workers.deaths import DecoderDied, Places
from data.workers.quarantine import Quarantine

DECODING = "data/image_stream.py"  # in the stack of a process that died while it read or decoded a sample


class PictureDeaths:
    """Notes what the processes of a stream decode, and which pictures two processes died of, earlier starts included.

    Args:
        folder: the run's, in which deaths are noted for the next start; None: they are not.
        label: train or val, as encode jobs name their sources.
        shards: the source's ids.

    Attributes:
        places: of worker processes.

    Raises:
        ValueError: a shard kills the processes that read it.
    """

    def __init__(self, folder: Path | None, label: str, shards: Collection[str]) -> None:
        group = distributed.is_initialized()
        rank = distributed.get_rank() if group else 0
        self.places = Places([InputShard(label, shard) for shard in shards])
        self._label = label
        self._crashes = None if folder is None else CrashLog(folder, f"{label}-{rank}", DECODING)
        self._quarantine = Quarantine("pictures")
        if self._crashes is not None:
            self._crashes.find()
            if group and distributed.get_world_size() > 1:  # those that read the same samples leave out the same
                distributed.barrier()
            for number, death in enumerate(self._crashes.deaths()):
                if death.positions[0].shard.label == label and death.positions[0].shard.shard in shards:
                    self._give_up(self._quarantine.add(death, -2 - number))  # of another start: no two are in a row

    def add(self, death: DecoderDied, batches: int) -> None:
        """Takes the death of worker processes, after which new ones are started.

        Args:
            death: of processes, which have been ended.
            batches: number of batches that the trainer took by now.

        Raises:
            ValueError: no sample is known to be the cause, too many processes died in a row, or a shard kills those
                that read it.
        """
        if self._crashes is not None:
            self._crashes.add(death)
        self._give_up(self._quarantine.add(death, batches))

    def kills(self, shard: str, number: int) -> bool:
        """Whether two processes died of a sample."""
        return Position(InputShard(self._label, shard), number) in self._quarantine.killers

    def mark(self, shard: str, number: int, key: str = "") -> None:
        """This process begins to read a sample, or, where it says its key, to decode it."""
        place = InputShard(self._label, shard)
        if get_worker_info() is not None:
            self.places.mark(place, number, key)
        elif self._crashes is not None:
            self._crashes.mark(place, number, key)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context for reading and decoding, in which the death of this process counts as caused by its sample."""
        own = self._crashes if get_worker_info() is None else None
        if own is not None:
            own.open()
        with nullcontext() if own is None else own.watched():
            yield
        self.places.leave()

    def close(self) -> None:
        """Must be called when this process has decoded its last sample."""
        if self._crashes is not None and get_worker_info() is None:
            self._crashes.close()

    def _give_up(self, shards: dict[InputShard, str]) -> None:
        for shard, problem in shards.items():
            again = "" if self._crashes is None else f"; {self._crashes.file} notes it: remove the file to try again"
            raise ValueError(f"data: shard {shard.shard}: {problem}; take the shard out of the source{again}")
