"""Reads input shards in worker processes and makes batches of pixels and tokenized captions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.crops import CROPS
from data.sources.base import InputShard, Position, Rejected, Sample, Source
from data.sources.filters import decoded
from data.system.interrupts import interrupts_after_forks
from data.transforms import crop_box, resize, side_needed
from data.workers.deaths import Places, forget_alarms, keep_alarms, raise_alarm
from precompute.encoding.batch import DecodedBatch, ImageFacts, ShardEnd
from precompute.encoding.columns import stored_key
from precompute.output.problems import Problem
from precompute.output.unreadable import Unreadable, read_samples


@dataclass(frozen=True)
class Preparation:
    """How an image is decoded and cropped (see `precompute.config.EncodeConfig`).

    Attributes:
        filter: a filter component (see `data.sources.filters.Filter`).
        tokenize: list of captions -> int64 (B, L); None where captions are not embedded.
    """

    filter: Any
    tokenize: Callable[[list[str]], Tensor] | None
    resolutions: tuple[int, ...]
    crop: str
    crops: int
    upscale: bool
    seed: int
    batch: int

    @property
    def shrink_to(self) -> int:
        """The least side, in pixels, that a decode at reduced size must leave."""
        return side_needed(max(self.resolutions), self.crop)


class DecodedBatches(IterableDataset):
    """Batches of this process's shards. Each worker fills its batches across the ends of its shards, and its last one
    with black images.

    Args:
        shards: what is read.
        sources: by label.
        preparation: how images are decoded.
        killers: samples that are rejected unseen, because processes died of them.
        note: called in this process before each sample with its shard and number, where there are no workers.
        begin: called with each shard before it is read; False: it is left out, because another rank has it.
    """

    def __init__(
        self,
        shards: list[InputShard],
        sources: dict[str, Source],
        preparation: Preparation,
        killers: Collection[Position] = (),
        note: Callable[[InputShard, int], None] | None = None,
        begin: Callable[[InputShard], bool] = lambda shard: True,
    ) -> None:
        self.begin = begin
        self.shards = shards
        self.sources = sources
        self.preparation = preparation
        self.killers = frozenset(killers)
        self.places = Places(shards)
        self._mark = self.places.mark if note is None else note

    def __iter__(self) -> Iterator[DecodedBatch]:
        worker = get_worker_info()
        batch = self._empty()
        for shard, part, parts in assign(self.shards, *(worker.id, worker.num_workers) if worker else (0, 1)):
            if not self.begin(shard):
                continue
            for item in self._read(shard, part, parts):
                if isinstance(item, tuple):
                    self._put(batch, *item)
                    if len(batch.images) == self.preparation.batch:
                        yield self._full(batch)
                        batch = self._empty()
                elif isinstance(item, ShardEnd):
                    batch.ends.append(item)
                else:
                    batch.failures.append((shard, item))
            # The end of a shard must not wait for the next image: there is none where all others are rejected.
            if not batch.images:
                yield self._full(batch)
                batch = self._empty()
        if batch.images:
            yield self._full(batch)
        self.places.leave()

    def _read(
        self, shard: InputShard, part: int, parts: int
    ) -> Iterator[tuple[Position, Sample | Rejected] | ShardEnd | Problem]:
        """(position, sample) of every `parts`-th sample, then the shard's end, or the error that it broke off with."""
        number = 0
        try:
            self._mark(shard, 0)
            for number, sample in enumerate(read_samples(self.sources[shard.label], shard.shard), start=1):
                if (number - 1) % parts == part:
                    position = Position(shard, number - 1)
                    yield position, self._unless_killer(position, sample)
                self._mark(shard, number)
        except Unreadable as error:
            yield error.problem
            return
        yield ShardEnd(shard, number, parts)

    def _unless_killer(self, position: Position, sample: Sample | Rejected) -> Sample | Rejected:
        if position in self.killers:
            return Rejected(sample.key, "kills_decoder", "two processes that decoded it died")
        return sample

    def _put(self, batch: DecodedBatch, position: Position, sample: Sample | Rejected) -> None:
        wanted = self.preparation
        if not isinstance(sample, Rejected):
            sample = decoded(wanted.filter, sample, wanted.shrink_to)
        if isinstance(sample, Rejected):
            batch.rejected.append((position, sample))
            return
        width, height = sample.original_size
        largest = max(wanted.resolutions)
        if not wanted.upscale and min(width, height) < largest:
            detail = f"{width}x{height} for {largest}; `upscale: true` takes it"
            batch.rejected.append((position, Rejected(sample.key, "too_small", detail)))
            return
        row = len(batch.images)
        boxes = {
            resolution: [
                crop_box((width, height), resolution, wanted.crop, self._generator(position.shard, sample.key, number))
                for number in range(wanted.crops)
            ]
            for resolution in wanted.resolutions
        }
        for resolution, crops in boxes.items():
            pixels = batch.pixels[resolution][row].numpy()
            for crop, box in enumerate(crops):
                pixels[crop] = resize(sample.image, box, resolution, sample.original_size, area=wanted.crop in CROPS)
        batch.images.append(ImageFacts(position, stored_key(sample.key), sample.caption, width, height, boxes))

    def _generator(self, shard: InputShard, key: str, crop: int) -> np.random.Generator:
        """Random crops depend on seed, shard, key and number only, not on workers, ranks or restarts."""
        name = f"{shard.shard}\0{key}".encode("utf-8", "surrogateescape")
        return np.random.default_rng([self.preparation.seed, zlib.crc32(name), *([crop] if crop else [])])

    def _empty(self) -> DecodedBatch:
        shape = self.preparation.batch, self.preparation.crops
        pixels = {r: torch.empty((*shape, r, r, 3), dtype=torch.uint8) for r in self.preparation.resolutions}
        return DecodedBatch(pixels, torch.empty(0, dtype=torch.int64), [])

    def _full(self, batch: DecodedBatch) -> DecodedBatch:
        count, size = len(batch.images), self.preparation.batch
        if not count:
            batch.pixels = {r: pixels[:0].clone() for r, pixels in batch.pixels.items()}
            return batch
        for pixels in batch.pixels.values():
            pixels[count:] = 0
        if self.preparation.tokenize is not None:
            captions = [image.caption for image in batch.images]
            batch.tokens = self.preparation.tokenize(captions + [""] * (size - count))
        if get_worker_info() is not None:
            # The thread that sends the batch would do it, too, but print an error and go on without the batch.
            for tensor in (*batch.pixels.values(), batch.tokens):
                tensor.share_memory_()
        return batch


def assign(shards: list[InputShard], worker: int, workers: int) -> Iterator[tuple[InputShard, int, int]]:
    """(shard, part, parts) for one worker: whole shards, or every parts-th sample of one if workers outnumber shards.

    Workers that read whole shards fetch remote ones in parallel. A worker that reads a part of a shard skips the other
    samples without decoding them.
    """
    if len(shards) >= workers:
        yield from ((shard, 0, 1) for shard in shards[worker::workers])
    elif shards:
        mine = worker % len(shards)
        yield shards[mine], worker // len(shards), len(range(mine, workers, len(shards)))


def batches(decoded: DecodedBatches, workers: int, prefetch: int, pin: bool) -> Iterator[DecodedBatch]:
    """The batches, prepared ahead of time by worker processes.

    Args:
        workers: number of worker processes; 0 prepares batches in this process.
        prefetch: batches that each worker prepares ahead.
        pin: whether to move batches to pinned memory.

    Raises:
        RuntimeError: a worker died; see `data.workers.deaths.worker_deaths`.
    """
    loader = DataLoader(
        decoded,
        batch_size=None,
        collate_fn=_same,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin,
        # Where each worker has its own shards, a worker that waits for a download must not hold up the others. Where
        # they share a shard, batches come in turn: otherwise the writer would collect the faster worker's samples.
        in_order=len(decoded.shards) < workers,
        multiprocessing_context="fork" if workers else None,  # the tokenizer and the sources need not be picklable
    )
    forget_alarms()
    with interrupts_after_forks():
        batches = iter(loader)
    if workers:
        keep_alarms()  # raised anywhere, in the midst of a lock for instance, the error could stop the job for ever
    for batch in batches:
        raise_alarm()  # the other workers go on, and their batches come
        yield batch


def _same(batch: DecodedBatch) -> DecodedBatch:
    return batch
