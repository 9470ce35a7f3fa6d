"""Samples of encoded sets to batches: the library's order, sharding and resumption, a reading of its own."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from time import sleep, time_ns
from typing import Any

import numpy as np
import torch
from streaming import Stream, StreamingDataset
from streaming.base.dataset import TICK, _Iterator, _ShardState
from torch import Tensor
from torch.utils.data import DataLoader

from data.encoded_sets import EncodedSet
from data.loading import Batch, Placement
from data.mds_batches import OpenShard, OpenShards, Rows, layouts, path_of
from data.shared_batches import BatchBlocks, Specs, bytes_of

PREFETCH = 4  # batches ready or under way, a worker
TRIES = 8  # to open a shard that may be evicted as soon as it is fetched; streaming's own number
FAILED = "a shard could not be fetched or decompressed; the reason was printed when it happened"


class EncodedDataset(StreamingDataset):
    """Samples' numbers in the library's order, and `read` from numbers to a batch, which subclasses define.

    Order, sharding, mixing, download, cache and resumption are the library's. Its decoding is not used: an item is the
    sample's number, and `read` fills a batch's memory from the shards.

    Attributes:
        epoch: that `read` is asked for the samples of, also after a resume in its middle.

    Args:
        columns: columns of the arrays that are read, by the name that `read` fills them under.
        texts: columns of the texts that are read.
        blocks: see `BatchBlocks`; for worker processes.
        arguments: of StreamingDataset.

    Raises:
        ValueError: shards that `Layout.of` refuses, or that differ in the shapes of these columns.
    """

    def __init__(
        self, *, columns: Mapping[str, str], texts: Sequence[str] = ("key",), blocks: int = 0, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.epoch = 0
        self.layouts = layouts(self.shards, columns, texts)
        self.arrays = self.layouts[0].arrays
        self.files = OpenShards()
        self.blocks = BatchBlocks(blocks, bytes_of(self.specs(self.batch_size)))
        self._decompressed = bytearray(self.num_shards)

    @abstractmethod
    def specs(self, samples: int) -> Specs:
        """Shapes and number formats of a batch of so many samples."""

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Batch:
        """A batch. The collate_fn of a DataLoader over this data set.

        Args:
            numbers: B samples' numbers.

        Raises:
            ValueError: a broken shard.
            RuntimeError: a shard that cannot be fetched, or one that is evicted again and again.
        """

    def fill(self, numbers: Sequence[int], tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Reads samples into the rows of some tensors, and gives each one's texts when its row is filled.

        Args:
            numbers: B samples' numbers.
            tensors: (B, *shape) of every array of the layouts. Errors as `read`.
        """
        ids = np.asarray(numbers)
        shards = np.searchsorted(self.spanner.shard_bounds, ids, side="right") - 1
        samples = (ids - self.spanner.shard_bounds[shards]).tolist()
        if self.cache_limit:
            self.files.keep(set(np.flatnonzero(self._shard_states.numpy() == _ShardState.LOCAL).tolist()))
        rows = Rows(tensors)
        for row, (shard, sample) in enumerate(zip(shards.tolist(), samples, strict=True)):
            yield rows.fill(row, self.layouts[shard], self._file(shard), sample)
        self._shard_access_times[shards] = time_ns()

    def __iter__(self) -> Iterator[int]:
        """This worker's samples' numbers, in the order of the next epoch.

        Raises:
            RuntimeError: a shard could not be fetched. The library's own loop ends the epoch early then, in silence.
        """
        yield from super().__iter__()
        if self._event.is_set():
            raise RuntimeError(FAILED)

    def _get_work(self, epoch: int, sample_in_epoch: int) -> np.ndarray:
        """As the library's, which is the one place that tells a worker its epoch."""
        self.epoch = epoch
        return super()._get_work(epoch, sample_in_epoch)

    def _each_sample_id(self, it: _Iterator) -> Iterator[int]:
        """As the library's, but a number goes out once its shard was asked for: `read` waits for it.

        The library lets a thread wait for the shards. With a cache limit, that one waits for ever for a shard that
        another worker evicts before the thread has seen it.
        """
        try:
            while it.yield_index < it.total and not it.should_exit() and not self._event.is_set():
                if it.prepare_index <= it.yield_index:
                    sleep(TICK)
                    continue
                number = it.sample_ids[it.yield_index]
                if number >= 0:  # -1 fills up the last batch
                    yield number
                it.yield_index += 1
            it.on_exit()
        finally:
            it.non_blocking_exit()  # else the fetching thread of an epoch that is left early never ends

    def _ready_thread(self, it: _Iterator) -> None:
        """The library's thread that waits; not needed, see `_each_sample_id`."""
        it.on_exit()

    def get_item(self, sample_id: int, retry: int = 7) -> int:
        """The sample's number, as `read` takes it."""
        return int(sample_id)

    def _file(self, shard: int) -> OpenShard:
        for _ in range(TRIES):
            try:
                if shard in self.files or self._shard_states[shard] == _ShardState.LOCAL:
                    return self.files.get(shard, self.shards[shard])
            except FileNotFoundError:
                self._decompressed[shard] = False
            self.prepare_shard(shard)  # evicted between the library's order and here
        raise RuntimeError(
            f"shard {shard} of {self.streams[self.stream_per_shard[shard]].local} is not there after {TRIES} tries; "
            "raise cache_limit if there is one, else see whether the shard lies in the set"
        )

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetches or decompresses a shard if need be.

        The library asks this for every sample under a lock that all processes of a machine share, which costs more
        than reading the sample. For a shard that is there only its time of use is noted, as the library does on
        reading.
        """
        if self._decompressed[shard_id] and self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time_ns()
            return
        super().prepare_shard(shard_id, blocking)
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._decompressed[shard_id] = os.path.isfile(path_of(self.shards[shard_id]))


def open_loader(dataset: EncodedDataset, placement: Placement, workers: int, drop_last: bool) -> DataLoader:
    """Batches of a data set, as every component that reads encoded sets gives them.

    Args:
        dataset: made with `shared_blocks(workers)`.
        placement: which part of it, and how large a batch.
        workers: processes that read.
        drop_last: leave out the last, incomplete batch of an epoch (training only).
    """
    return DataLoader(
        dataset,
        batch_size=placement.batch,
        collate_fn=dataset.read,
        drop_last=drop_last and placement.training,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=placement.pin,
        generator=torch.Generator(),  # not the one that noise is drawn from
    )


def shared_blocks(workers: int) -> int:
    """Batches under way, ready and in use at once."""
    return workers * PREFETCH + 4 if workers else 0


def streams_of(sets: Mapping[str, EncodedSet]) -> list[Stream]:
    """Encoded sets as the library takes them."""
    return [Stream(local=s.local, remote=s.remote, **s.options) for s in sets.values()]


def key_seed(key: str) -> int:
    """A seed from a sample's key: the same on every machine, in [0, 2^63)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
