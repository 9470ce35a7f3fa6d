"""A data set that fetches shards while it is read, without four ways in which streaming then waits for ever, and two in
which it removes sets.

With several workers and a `cache_limit`, a worker that waits for a shard which another one is fetching can sleep
through the moment in which it is there: it is evicted again, and nobody fetches it for the one that waits. After a
shard could not be fetched, it counts as being fetched from then on, so all others that need it wait. The end of the
epoch waits until the threads that fetch have said that they are done, which a failed one does not. And where there is
nothing left to evict, the lock of the cache stays taken.

To make room in a cache, streaming removes the shards that were not read for the longest time, also of sets that it has
not fetched: their own folders count as caches. Of a compressed set it removes the decompressed files whose compressed
ones are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from time import sleep, time_ns
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState
from streaming.base.format import FileInfo, Reader
from streaming.base.format.mds.reader import MDSReader
from streaming.base.storage import CloudDownloader
from streaming.base.util import wait_for_file_to_exist
from streaming.base.world import World

from data.encoded.mds_index import INDEX, Shard, read_index
from data.encoded.shard_places import compact_places
from data.remote.downloads import advice, fetch, is_refused, store_error
from data.system.disk_errors import about, disk_error, disk_line, may_pass
from data.system.errors import WorkersError, one_line
from data.system.files import atomic_write, remove_partial
from data.system.locks import in_turn
from data.system.memory import NotEnoughMemory, memory_to_read

# Seconds that a machine's processes wait for the one that fetches an index, which may have gigabytes. After as many, a
# run takes a machine for lost.
INDEX_WAIT = 600.0
TURNS = ".lock-shards"  # in a cache; each shard has a byte of it, which is locked while the shard is fetched
STALE = 3600.0  # seconds since its last change after which what a killed process decompressed is removed


class NotFetched(WorkersError, RuntimeError):
    """A shard could not be fetched or decompressed. Its message's last line says which, why, and what to do."""


class NoAnswer(NotFetched):
    """The store did not answer, and later may."""


class NoRoom(ValueError):
    """The cache has no room for a shard. The text says what to do."""


class WholeStream(Stream):
    """streaming's Stream; a file appears in the cache whole or not at all.

    Google's client writes to the file that it is given. If the connection breaks, the next attempt takes the part that
    came for the file, and after a process was killed the next one does.

    The index need not be trusted: streaming would fail on any damage, and take files from outside of the folder.

    Attributes:
        held: bytes of a set that is nowhere else, on the first process of a machine.
    """

    held = 0
    _process: int | None = None  # that the downloader belongs to

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """See `Stream.get_shards`. The index is read once, and each entry takes up a fifth of the memory: streaming
        copies what it says of the columns for every file.

        Raises:
            FileNotFoundError: there is no index in a folder.
            ValueError: as `_fetch_index` and `read_index`, the set has no samples, or a column is not safe to read.
        """
        folder = Path(self.local, self.split)
        if self.remote is not None and not (folder / INDEX).is_file():
            self._fetch_index(folder / INDEX, world)
        entries = read_index(folder)
        if not any(entry["samples"] for entry in entries):
            raise ValueError(f"{folder}: a set without samples; leave it out, or encode it again")
        shards: list[Reader] = []
        for number, entry in enumerate(entries):
            shards.append(self._reader(entry))
            if number == 0 or shards[number].column_encodings is not shards[number - 1].column_encodings:
                shards[number].validate(allow_unsafe_types)
            entries[number] = None  # of a million files, the entries and the readers are a gigabyte each
        return shards

    def _fetch_index(self, path: Path, world: World) -> None:
        """One process of a machine fetches the index. The others wait for all of its attempts, which have pauses.

        Raises:
            OSError: of this disk.
            ValueError: the store refuses it.
            Outage: the store does not answer.
        """
        if world.is_local_leader:
            try:
                self._download_file(INDEX)
            except Exception as error:  # each store's client has its own errors, without a common base class
                if disk_error(error) is not None:
                    raise
                address = os.path.join(self.remote, self.split, INDEX)
                line = f"{address}: cannot be fetched ({one_line(error)}); {advice(error)}"
                raise store_error(line, error) from error
        else:
            late = f"{path}: the first process of this machine has not fetched it, see its log: "
            wait_for_file_to_exist(str(path), TICK, max(self.download_timeout, INDEX_WAIT), late)

    def _reader(self, entry: Shard) -> MDSReader:
        """streaming's reader of a file, which its own `from_json` makes of a copy of all that the entry holds."""
        raw, zipped = (
            None if file is None else FileInfo(file["basename"], file["bytes"], file["hashes"])
            for file in (entry["raw_data"], entry.get("zip_data"))
        )
        return MDSReader(
            dirname=self.local,
            split=self.split,
            column_encodings=entry["column_encodings"],
            column_names=entry["column_names"],
            column_sizes=entry["column_sizes"],
            compression=entry.get("compression"),
            hashes=entry["hashes"],
            raw_data=raw,
            samples=entry["samples"],
            size_limit=None,  # of the writer
            zip_data=zipped,
        )

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: NDArray[np.int64]) -> None:
        """See `Stream.set_up_local`. A set that is nowhere else counts as whole; what it lacks, readers find.

        On a file system that many machines share, a walk through the folders of all shards takes each of them minutes.
        """
        if self.remote is None:
            cache_usage_per_shard[:] = [shard.get_raw_size() for shard in shards]
        else:
            super().set_up_local(shards, cache_usage_per_shard)
        self.held = 0 if self.remote is not None else int(cache_usage_per_shard.sum())

    def prepare_shard(self, shard: Reader) -> int:
        """See `Stream.prepare_shard`. What a set that is nowhere else decompresses is in no cache: nobody evicts it.

        Two data sets of a run may have one cache, such as a validation set that is read at two resolutions. If both
        fetched a shard at the same time, one would give the file its name that the other still writes.
        """
        if self.remote is None:
            super().prepare_shard(shard)
            return 0
        name = shard.raw_data.basename
        with in_turn(Path(self.local, self.split, TURNS), crc32(name.encode())):
            return super().prepare_shard(shard)

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        path = Path(self.local, self.split, to_basename or from_basename)
        partial = path.with_name(f"{path.name}.part")
        if self.remote is None:
            raise FileNotFoundError(f"{path}: not there, and the set has no remote address")
        if self._process != os.getpid():
            # A client keeps connections open. On those of the parent, forked workers would read each other's answers.
            self._downloader, self._process = CloudDownloader.get(self.remote), os.getpid()
        remote = os.path.join(self.remote, self.split, from_basename)
        with about(path, partial):
            fetch(remote, partial, self.download_timeout, 1 + self.download_retry, self._downloader)
            partial.replace(path)
        return str(path)

    def _decompress_shard_part(
        self, zip_info: FileInfo, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        """As streaming's, which gives the file the same temporary name in every process. Of two that decompress it at
        the same time, on machines that share the folder or of two runs, one would rename what the other still writes.
        """
        raw = Path(raw_filename)
        remove_partial(raw, STALE)
        with atomic_write(raw) as partial:
            try:
                super()._decompress_shard_part(zip_info, zip_filename, str(partial), compression)
            finally:
                Path(f"{partial}.tmp").unlink(missing_ok=True)  # streaming's


class FetchingDataset(StreamingDataset):
    """See StreamingDataset.

    Args:
        arguments: of StreamingDataset.
    """

    def __init__(self, **arguments: Any) -> None:
        with compact_places():
            super().__init__(**arguments)
        self._failure: Exception | None = None  # what is raised where samples are read
        self._prepared: set[int] = set()  # shards that this process has prepared
        if self._unique_rank_world.is_local_leader:
            held = sum(stream.held for stream in self.streams if isinstance(stream, WholeStream))
            self.cache_usage -= held  # which is in no cache

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """See `StreamingDataset.prepare_shard`. A shard that could not be fetched can be tried again.

        Copies of it are removed: one whose hash is wrong would be taken for whole at the next look.
        """
        # streaming prepares the shard of each sample, and each time takes a file lock that all processes of the machine
        # share, and looks for the file. Neither is needed for a shard that this process has prepared, until it is gone.
        if not blocking and shard_id in self._prepared and self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time_ns()
            return
        shard = self.shards[shard_id]
        # Decompression joins pieces, so that for a moment it takes a shard twice.
        size = shard.get_max_size() + shard.get_raw_size()
        try:
            with memory_to_read(shard.raw_data.basename, size):
                super().prepare_shard(shard_id, blocking)
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._prepared.add(shard_id)
        except Exception as error:
            remote = self.streams[self.stream_per_shard[shard_id]].remote is not None
            self._failure = _failure(error, shard, remote)
            lock = self._cache_filelock
            if not lock.is_locked:
                lock.acquire()
            try:
                if remote:
                    shard.evict()
                self._shard_states[shard_id] = _ShardState.REMOTE
            finally:
                lock.release()
            raise

    def _evict_coldest_shard(self) -> None:
        """See `StreamingDataset._evict_coldest_shard`, of shards that can be fetched again."""
        fetched = np.array([stream.remote is not None for stream in self.streams])[self.stream_per_shard]
        here = np.flatnonzero(fetched & (self._shard_states.numpy() == _ShardState.LOCAL))
        if not here.size:
            raise NoRoom("the cache has no room for a shard, and none that could be removed; raise cache_limit")
        self._evict_shard(here[self._shard_access_times.numpy()[here].argmin()])

    def _prepare_thread(self, it: _Iterator) -> None:
        """As streaming's, but the end of the epoch does not wait for it after a shard could not be fetched."""
        try:
            super()._prepare_thread(it)
        except BaseException:
            it.on_exit()
            raise

    def _ready_thread(self, it: _Iterator) -> None:
        """As streaming's, which looks only once whether a shard was evicted that it waits for."""
        try:
            while not (it.should_exit() or it.ready_index == it.total or self._event.is_set()):
                sample = it.sample_ids[it.ready_index]
                far = self.predownload is not None and it.ready_index - it.yield_index > self.predownload
                if far or (sample != -1 and not self._is_here(sample)):
                    sleep(TICK)
                else:
                    it.ready_index += 1
        finally:  # also when a shard could not be fetched: the end of the epoch waits for this thread
            it.on_exit()

    def _is_here(self, sample: int) -> bool:
        """Whether the shard of a sample is on this disk. One that is not, and that nobody fetches, is fetched."""
        shard, _ = self.spanner[sample]
        if self._shard_states[shard] == _ShardState.REMOTE:
            self.prepare_shard(shard, blocking=False)
        return self._shard_states[shard] == _ShardState.LOCAL

    def on_exception(self, future: Future) -> None:
        """streaming calls this when a thread that fetches shards has ended."""
        if future.exception() is not None:
            self._failure = self._failure or NotFetched(f"no shards are fetched: {one_line(future.exception())}")
            self._event.set()  # streaming's own raises the error, too, into a log that nobody reads

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples of the next epoch.

        Raises:
            NotFetched: a shard could not be fetched. streaming itself would end the epoch without a message.
            NotEnoughMemory: there was none to decompress a shard.
        """
        self._failure = None
        self._forget_order()
        try:
            yield from super().__iter__()
        except Exception as error:
            if self._failure is None:
                raise
            raise self._failure from error
        if self._failure is not None:
            raise self._failure
        self._forget_order()

    def _forget_order(self) -> None:
        """Free the order of the last epoch: streaming registers each epoch's iterator with Python's exit, so it stays
        until the process ends. An epoch that is left after its last sample, as loaders without workers do where the
        last batch is a full one, ends when the next one begins."""
        if hasattr(self, "_iterator"):
            self._iterator.exit()  # waits for its two threads, which read the order
            self._iterator.sample_ids = self._iterator.sample_ids[:0].copy()


def _failure(error: Exception, shard: Reader, remote: bool) -> NotEnoughMemory | NotFetched:
    """What is raised for the samples of a shard after an error.

    Args:
        error: of the shard's preparation.
        shard: that is missing now.
        remote: whether it is fetched from somewhere.
    """
    if isinstance(error, NotEnoughMemory):
        return NotEnoughMemory(str(error))
    kind = NotFetched
    if (of_disk := disk_error(error)) is not None:
        why, kind = disk_line(of_disk), NoAnswer if may_pass(of_disk) else NotFetched
    elif isinstance(error, NoRoom):
        why = str(error)
    elif remote and not str(error).startswith("Checksum failure"):  # streaming's, of what the store has given
        refused = is_refused(error)
        why = f"{one_line(error)}; {'' if refused else 'start again when the store answers, and '}{advice(error)}"
        kind = NotFetched if refused else NoAnswer
    else:
        why = f"{one_line(error)}; copy or make the set again"
    return kind(f"a shard could not be fetched or decompressed: {shard.raw_data.basename}: {why}")
