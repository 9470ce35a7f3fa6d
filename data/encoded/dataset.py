"""Batches of encoded sets: streaming's public interface for order, sharding, caching and resumption.

streaming decodes a sample into one dict of arrays, which costs two copies per sample before collation. Here the data
set's shard readers are `ColumnReader`s, whose samples are views of the bytes that were read, and the collation copies
these views into the batch's memory.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from streaming import Stream, StreamingDataLoader
from streaming.base.batching import batching_methods, generate_work
from streaming.base.world import World
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data.encoded.column_reader import DamagedError, LostError, StoredSample, column_readers
from data.encoded.drawn_parts import lean_draws
from data.encoded.fetching import FetchingDataset, NoAnswer, NotFetched, WholeStream
from data.encoded.next_order import NextOrder
from data.encoded.sets import EncodedSet
from data.encoded.shared_batches import BatchBlocks, Specs, bytes_of
from data.encoded.shared_names import lock_cache, own_names, sized_memory
from data.loading import REMEMBERED_POSITIONS, WEIGHT, Batch, Placement, end_idle_workers, leave_signals, position
from data.ranges import check_reading
from data.system.errors import Outage, one_line
from data.system.garbage_collection import rare_searches

PREFETCH = 4  # batches that are ready or being read, per worker
# Seconds that training waits for a batch: a store may be slow, but a worker may also be lost. Where other ranks have
# their batches, they end the run after 600 s, in a collective; where all wait for the same store, none does.
LONGEST_WAIT = 1800
LONGEST_SEARCH = 20.0  # seconds, for the keys of samples
AHEAD_FROM = 1 << 20  # samples of an epoch whose order is made ahead; of fewer, it takes a fraction of a second

# streaming calls its batching method for the order of an epoch.
batching_methods["ahead"] = lambda dataset, *place: dataset.order(*place)


# streaming warns in each epoch that positions must count the samples of copies once, which `EncodedLoader` does.
logging.getLogger("streaming.base.dataset").addFilter(lambda record: "`replication` arg" not in record.getMessage())


class EncodedDataset(FetchingDataset):
    """Samples of encoded sets in streaming's order, and `collate`, which subclasses define, from samples to a batch.

    Args:
        columns: names of the array columns that are read, by their names in the batch.
        texts: names of the text columns that are read.
        blocks: number of `BatchBlocks`, for worker processes.
        weighted: whether samples have weights (see `weights`), as those of a validation set do.
        arguments: of StreamingDataset.

    Raises:
        ValueError: see `column_readers` and StreamingDataset; an `Outage` where a store does not answer; or a stream
            has no part in an epoch.
    """

    @rare_searches()  # a set may have a million files, each with some objects
    def __init__(
        self,
        *,
        columns: Mapping[str, str],
        texts: Sequence[str] = ("key",),
        blocks: int = 0,
        weighted: bool = False,
        **arguments: Any,
    ) -> None:
        with own_names():
            try:
                super().__init__(**arguments)
            except ValueError as error:  # streaming's own checks, such as of the size of the cache
                kind = Outage if isinstance(error, Outage) else ValueError
                raise kind(f"data: {one_line(error)}") from None
        for stream in self.streams:
            if not stream.choose:  # streaming rounds
                raise ValueError(
                    f"data: {stream.local}: none of its samples would ever be read, as its part of the "
                    f"{int(self.epoch_size)} samples of an epoch is below one; raise its proportion or `repeat`, or "
                    "epoch_size, or remove the stream"
                )
        self._batching, self.batching_method = self.batching_method, "ahead"
        self._next_order = NextOrder()
        self.weighted = weighted
        self._weights: np.ndarray | None = None  # (samples stored,) float32, of the epoch that is being read
        world = self._unique_rank_world
        self.shards = column_readers(self.shards, columns, texts, world.rank, world.num_ranks)
        for shard, stream in zip(self.shards, self.stream_per_shard.tolist(), strict=True):
            # streaming checks what it fetches or decompresses; files that were there before, it takes as they are.
            if self.streams[stream].remote is None:
                shard.check_with(self.streams[stream].validate_hash)
        self.arrays = self.shards[0].arrays
        self.blocks = BatchBlocks(blocks, bytes_of(self._batch_specs(self.batch_size)))
        self.finished_epoch: int | None = None

    def check_shapes(self, whole: bool, **expected: tuple[int, ...]) -> None:
        """Compare what the index says of columns with what the manifest says of the set.

        Args:
            whole: whether they hold whole numbers.
            expected: shapes by the names of columns in a batch.

        Raises:
            ValueError: they contradict each other.
        """
        for name, shape in expected.items():
            array = self.arrays[name]
            if array.shape != shape or array.dtype.is_floating_point == whole:
                kind = "whole" if whole else "floating-point"
                raise ValueError(
                    f"{self.shards[0].path}: {name} has {array.dtype} {array.shape}, the manifest says {kind} numbers "
                    f"{shape}; copy the set again, or encode it again"
                )

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """See `StreamingDataset.state_dict`; Composer calls it with the number of samples of its current epoch.

        At an epoch's end that is 0 samples, and means the beginning of the next epoch. streaming takes it for the
        beginning of the epoch that was read last, and a resumed run would read that one again.
        """
        state = super().state_dict(num_samples, from_beginning)
        if from_beginning and not num_samples and state["epoch"] == self.finished_epoch:
            state |= {"epoch": self.finished_epoch + 1, "sample_in_epoch": 0}
        return state

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """See `StreamingDataset.load_state_dict`. Nothing is left of an epoch that has fewer samples now than the state
        has seen of it, where streaming would raise an error."""
        with sized_memory():  # all ranks of a machine share it
            super().load_state_dict(obj | {"sample_in_epoch": min(obj["sample_in_epoch"], int(self.epoch_size))})

    @property
    def epoch(self) -> int:
        """The epoch whose samples are being read, also in a worker process and after a resume in its middle.

        streaming counts epochs in memory that a machine's processes share. None of them goes on to the next epoch
        before all of them have read theirs to the end.
        """
        return self.next_epoch - 1

    def _get_work(self, epoch: int, sample_in_epoch: int) -> np.ndarray:
        """See StreamingDataset, which calls this as each worker begins an epoch."""
        own = super()._get_work(epoch, sample_in_epoch)
        if self.weighted:
            self._weights = self.weights(epoch, sample_in_epoch)
        elif self._unique_worker_world.is_local_leader and get_worker_info() and self.epoch_size >= AHEAD_FROM:
            world, following = self._parallel_worker_world, epoch + 1
            self._next_order.begin(
                self._order_key(world, following, 0), lambda: self._make_order(world, following, 0)
            )
        return own

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """See StreamingDataset."""
        with lean_draws():
            return super().resample_streams(epoch, stream_id)

    def order(self, world: World, epoch: int, sample_in_epoch: int) -> np.ndarray:
        """The numbers of the samples of an epoch, in the order in which they are read.

        Args:
            world: the processes that read.
            epoch: number of the epoch.
            sample_in_epoch: number of samples that all ranks have seen of it.

        Returns:
            (machines, ranks per machine, workers per rank, batches per worker, batch size) int64, -1 for none.
        """
        made = self._next_order.take(self._order_key(world, epoch, sample_in_epoch))
        return self._make_order(world, epoch, sample_in_epoch) if made is None else made

    def _make_order(self, world: World, epoch: int, sample_in_epoch: int) -> np.ndarray:
        return generate_work(self._batching, self, world, epoch, sample_in_epoch)

    def _order_key(self, world: World, epoch: int, sample_in_epoch: int) -> tuple[int | None, ...]:
        """What an order depends on and a resumption may change."""
        places = world.num_nodes, world.ranks_per_node, world.workers_per_rank
        state = self.num_canonical_nodes, self.initial_physical_nodes, self.shuffle_seed, self.shuffle_block_size
        return (epoch, sample_in_epoch, *places, *state)

    def weights(self, epoch: int, sample_in_epoch: int = 0) -> np.ndarray:
        """The weight with which each stored sample counts at each of its appearances in an epoch, float32.

        So that all ranks read equally many samples, streaming repeats some. The weight is the number of times that the
        epoch is to have a sample, over the number of times that it appears on all ranks: then a weighted mean is the
        mean over the epoch, for any number of ranks.
        """
        _, wanted = self.resample_streams(epoch)
        given = self._make_order(self._parallel_worker_world, epoch, sample_in_epoch)
        stored = int(self.samples_per_shard.sum())
        appearances = np.bincount(given[given >= 0], minlength=stored)
        wanted = np.bincount(wanted, minlength=stored)
        return (wanted / np.maximum(appearances, 1)).astype(np.float32)

    def get_item(self, sample_id: int, retry: int = 7) -> StoredSample:
        """See StreamingDataset."""
        sample = super().get_item(sample_id, retry)
        return sample if self._weights is None else sample._replace(weight=float(self._weights[sample_id]))

    def new_batch(self, samples: Sequence[StoredSample]) -> Batch:
        """Memory for a batch of `specs`, and the samples' `weight` (B,) float32 where they have weights."""
        batch = self.blocks.new(self._batch_specs(len(samples)))
        if self.weighted:
            batch[WEIGHT].numpy()[:] = [sample.weight for sample in samples]
        return batch

    def _batch_specs(self, samples: int) -> Specs:
        specs = self.specs(samples)
        return {**specs, WEIGHT: ((samples,), torch.float32)} if self.weighted else specs

    @abstractmethod
    def specs(self, samples: int) -> Specs:
        """Shapes and dtypes of a batch of this many samples."""

    @abstractmethod
    def collate(self, samples: Sequence[StoredSample]) -> Batch:
        """B samples as a batch. In a worker process it lies in one of the shared blocks."""


def copy_rows(samples: Sequence[StoredSample], tensors: Mapping[str, Tensor]) -> None:
    """Copies the arrays of B samples into the rows of contiguous CPU tensors (B, *shape), by name."""
    for name, tensor in tensors.items():
        rows = tensor.view(len(samples), -1).view(torch.uint8).numpy()
        for row, sample in zip(rows, samples, strict=True):
            row[:] = sample.arrays[name]


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """PyTorch's iterator with workers; one that died is noticed within seconds, also while a batch is waited for.

    PyTorch learns of it by a signal, and raises an error wherever this process is. If that is where errors are caught,
    or an instant before it waits, the error is lost. With a `timeout`, PyTorch looks after the workers only at its end.
    """

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            found = super()._try_get_data(max(0.0, min(left, MP_STATUS_CHECK_INTERVAL)))
            if found[0] or left <= MP_STATUS_CHECK_INTERVAL:
                return found


class EncodedLoader(StreamingDataLoader):
    """Batches of an `EncodedDataset`, and the position in them; see `Loading`.

    Args:
        dataset: what is read.
        ranks: number of processes, or groups of them, that train, each on its own part of an epoch.
        arguments: of DataLoader.
    """

    def __init__(self, dataset: EncodedDataset, ranks: int, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.ranks = ranks
        self._positions = deque([(0, 0)], REMEMBERED_POSITIONS)  # epoch and its samples on all ranks, after each batch

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return WatchedWorkers(self)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch, or of the rest of one that was resumed.

        Raises:
            ValueError: a shard could not be fetched, or is damaged.
            Outage: a shard could not be fetched, because the store does not answer.
            RuntimeError: the epoch ended early for another reason.
        """
        try:
            yield from self._epoch()
        except Exception as error:
            end_idle_workers(self)  # they would wait for as long as somebody holds the error, and with it this loader
            if isinstance(error, DamagedError):
                kind = Outage if isinstance(error, LostError) else ValueError
                raise kind(error.line) from None
            if not isinstance(error, NotFetched):
                raise
            kind = Outage if isinstance(error, NoAnswer) else ValueError
            raise kind(f"data: {error.line}") from None

    def _epoch(self) -> Iterator[Batch]:
        begin = None
        for batch in super().__iter__():
            begin = self._begin() if begin is None else begin
            epoch, sample = begin
            expected = self._expected(sample)
            if not expected:
                break  # resumed at the end of an epoch, whose order may have more samples: see below
            self._positions.append((epoch, sample + min(self.num_samples_yielded, expected) * self.ranks))
            last = self.num_samples_yielded >= expected
            if last:  # Composer asks for no batch after it, unless the epoch was resumed
                self.dataset.finished_epoch = epoch
                # For py1s and py2s, streaming fills an epoch up to a multiple of 64 samples per machine.
                beyond = self.num_samples_yielded - expected
                batch = {name: tensor[: len(tensor) - beyond] for name, tensor in batch.items()}
            yield batch
            if last:
                break
        epoch, sample = self._begin() if begin is None else begin
        expected = self._expected(sample)
        if self.num_samples_yielded < expected:
            raise RuntimeError(
                f"the epoch ended after {self.num_samples_yielded} of {expected} samples; see whether a shard could "
                "not be fetched, which is logged when it happens"
            )
        self._positions[-1] = (epoch + 1, 0)
        self.dataset.finished_epoch = epoch

    def _expected(self, sample: int) -> int:
        """The number of samples that this rank gets of an epoch of which all ranks had seen `sample`."""
        # Of the whole: the last batch on another number of ranks may have repeated samples, or none.
        left = max(0, math.ceil((self.dataset.epoch_size - sample) / self.ranks))
        return left - left % self.batch_size if self.drop_last else left

    def _begin(self) -> tuple[int, int]:
        """The start of the present iteration: the epoch, and the number of its samples that all ranks had seen."""
        return self.dataset.epoch, self.dataset.state_dict(0, from_beginning=False)["sample_in_epoch"]

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """See `Loading`. The format is that of StreamingDataset, so Composer's checkpoints hold the same."""
        epoch, samples = position(self._positions, ahead)
        return self.dataset.state_dict(samples, from_beginning=True) | {"epoch": epoch}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """See `Loading`. Where nothing is left of the state's epoch, the next epoch is read."""
        if obj["sample_in_epoch"] and not self._expected(obj["sample_in_epoch"]):
            # Some orders have more samples than an epoch. streaming would go on with these, or refuse the position.
            obj = obj | {"epoch": obj["epoch"] + 1, "sample_in_epoch": 0}
        super().load_state_dict(obj)
        self._positions.append((obj["epoch"], obj["sample_in_epoch"]))


def dataset_arguments(
    kind: str,
    streams: Mapping[str, EncodedSet],
    placement: Placement,
    workers: int,
    *,
    shuffle: bool,
    shuffle_algo: str,
    shuffle_block: int | None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `EncodedDataset`, from those of a component. All components that read encoded sets use it.

    Args:
        kind: name of the component, for messages.
        streams: encoded sets by label.
        placement: which part of the data this process reads, and the batch size.
        workers: number of processes that read.
        shuffle: shuffle the samples in each epoch (training only).
        shuffle_algo: streaming's shuffling algorithm (training only: some fill an epoch up with repeated samples).
        shuffle_block: number of samples within which parts of shards are shuffled; None: streaming's default.
        options: further arguments of StreamingDataset.

    Raises:
        ValueError: see `check_reading`, or another run uses the cache of a set.
    """
    check_reading(kind, workers=workers, shuffle_block=shuffle_block, **options)
    return {
        "streams": streams_of(streams),
        "blocks": shared_blocks(workers),
        "batch_size": placement.batch,
        "shuffle": shuffle and placement.training,
        "shuffle_algo": shuffle_algo if placement.training else "py1e",
        "shuffle_block_size": shuffle_block,
        "weighted": not placement.training,
        # With balanced, each validation would draw another part of a set, and a resumed run begin with the first again.
        "sampling_method": "balanced" if placement.training else "fixed",
        "shuffle_seed": placement.seed,
        "replication": placement.copies if placement.copies > 1 else None,
        **options,
    }


def open_loader(dataset: EncodedDataset, placement: Placement, workers: int, drop_last: bool) -> EncodedLoader:
    """A loader of a data set. All components that read encoded sets use it.

    Args:
        dataset: made with `dataset_arguments`.
        placement: which part of the data this process reads, and the batch size.
        workers: number of processes that read.
        drop_last: leave out the last, incomplete batch of an epoch (training only).
    """
    return EncodedLoader(
        dataset,
        placement.world,
        batch_size=placement.batch,
        collate_fn=dataset.collate,
        drop_last=drop_last and placement.training,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=placement.pin,
        timeout=LONGEST_WAIT if workers else 0,
        worker_init_fn=leave_signals,
        generator=torch.Generator(),  # not the global one, which noise is drawn from
    )


def shared_blocks(workers: int) -> int:
    """Number of batches that may be under way, ready or in use at the same time."""
    return workers * PREFETCH + 4 if workers else 0


def streams_of(sets: Mapping[str, EncodedSet]) -> list[Stream]:
    """Encoded sets as streaming's `Stream` objects.

    Raises:
        ValueError: another run uses the cache of one.
    """
    for encoded in sets.values():
        if encoded.remote:
            lock_cache(encoded.local)
    return [WholeStream(local=s.local, remote=s.remote, **s.options) for s in sets.values()]


def key_seed(key: str) -> int:
    """A seed from a sample's key: the same on every machine, in [0, 2^63)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def keys_of(dataset: EncodedDataset, seeds: Collection[int]) -> dict[int, str]:
    """Which samples seeds belong to: seed -> key, as far as their shards are on this disk, and found
    within `LONGEST_SEARCH`.

    The shards that were read last are searched first.
    """
    wanted, found, limit = set(seeds), {}, time.monotonic() + LONGEST_SEARCH
    for number in dataset._shard_access_times.numpy().argsort()[::-1]:
        shard = dataset.shards[number]
        for sample in range(shard.samples if os.path.isfile(shard.path) else 0):
            if len(found) == len(wanted) or time.monotonic() > limit:
                return found
            try:
                key = shard.get_item(sample).texts[0]
            except (ValueError, FileNotFoundError):  # it is damaged, or was just evicted
                continue
            if key_seed(key) in wanted:
                found[key_seed(key)] = key
    return found
