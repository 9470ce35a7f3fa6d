"""Input shards to batches of pixels and tokens, in worker processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.crops import CROPS, LARGEST
from data.sources.base import DecodedSample, Rejected, Source
from data.transforms import crop_box, resize


@dataclass(frozen=True)
class Job:
    """One input shard of one source."""

    label: str
    shard: str


@dataclass(frozen=True)
class Place:
    """Where a sample belongs: its job and its number there, in the source's order."""

    job: Job
    number: int


@dataclass(frozen=True)
class Picture:
    """What is stored of a sample beside latents and embedding.

    Attributes:
        width, height: of the original, in pixels.
        boxes: (left, top, right, bottom) of each crop in pixels of the original, by resolution.
    """

    place: Place
    key: str
    caption: str
    width: int
    height: int
    boxes: dict[int, list[tuple[float, float, float, float]]]

    @property
    def short_side(self) -> int:
        return min(self.width, self.height)


@dataclass
class Batch:
    """What a worker hands over.

    Attributes:
        pixels: uint8 (B, N, R, R, 3) by resolution, of N crops.
        tokens: int64 (B, L); empty where captions are not embedded.
        pictures: B of them.
        rejected: samples set aside, with their places.
        ends: jobs read to their end, with their number of samples.
        failures: jobs that could not be read, with one line of why.
    """

    pixels: dict[int, Tensor]
    tokens: Tensor
    pictures: list[Picture]
    rejected: list[tuple[Place, Rejected]] = field(default_factory=list)
    ends: list[tuple[Job, int]] = field(default_factory=list)
    failures: list[tuple[Job, str]] = field(default_factory=list)

    def pin_memory(self) -> Batch:
        """Moves the tensors to pinned memory; called by the DataLoader where a GPU copies from it."""
        self.pixels = {resolution: pixels.pin_memory() for resolution, pixels in self.pixels.items()}
        self.tokens = self.tokens.pin_memory()
        return self


@dataclass(frozen=True)
class Preparation:
    """How a picture is decoded and cut (see `EncodeConfig`).

    Attributes:
        filter: has `decode(sample, shrink_to)`.
        tokenize: list of captions -> int64 (B, L); None: captions are not embedded.
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
        """Side that a reduced decode must leave, in pixels."""
        largest = max(self.resolutions)
        return round(LARGEST * largest) if self.crop in CROPS else largest

    def box(
        self, size: tuple[int, int], resolution: int, rng: np.random.Generator
    ) -> tuple[float, float, float, float]:
        """A crop of a picture of (width, height) pixels; center and random are the same for every resolution."""
        if self.crop in CROPS:
            return CROPS[self.crop](size, resolution, rng)
        return crop_box(size, self.crop, rng)


class Decoder(IterableDataset):
    """Batches of this process's jobs; each worker fills its batches across the ends of its shards."""

    def __init__(self, jobs: list[Job], sources: dict[str, Source], preparation: Preparation) -> None:
        self.jobs = jobs
        self.sources = sources
        self.preparation = preparation

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        batch = self._empty()
        for job, part, parts in assign(self.jobs, *(worker.id, worker.num_workers) if worker else (0, 1)):
            for item in self._read(job, part, parts):
                if isinstance(item, tuple):
                    self._put(batch, *item)
                    if len(batch.pictures) == self.preparation.batch:
                        yield self._full(batch)
                        batch = self._empty()
                elif isinstance(item, int):
                    batch.ends.append((job, item))
                else:
                    batch.failures.append((job, str(item)))
            # A shard's last news must not wait for the next picture: with all of it rejected there may be none.
            if not batch.pictures:
                yield self._full(batch)
                batch = self._empty()
        if batch.pictures:
            yield self._full(batch)

    def _read(self, job: Job, part: int, parts: int) -> Iterator[Any]:
        """(place, sample) pairs of every `parts`-th sample, then their whole number, or the error that ended it."""
        number = 0
        try:
            for number, sample in enumerate(self.sources[job.label].read(job.shard), start=1):
                if (number - 1) % parts == part:
                    yield Place(job, number - 1), sample
        except (OSError, ValueError) as error:  # the source's own errors; anything else is a bug and ends the job
            yield " ".join(str(error).split()) or type(error).__name__
            return
        yield number

    def _put(self, batch: Batch, place: Place, sample: Any) -> None:
        wanted = self.preparation
        if not isinstance(sample, Rejected):
            sample = wanted.filter.decode(sample, wanted.shrink_to)
        if isinstance(sample, Rejected):
            batch.rejected.append((place, sample))
            return
        assert isinstance(sample, DecodedSample)
        width, height = sample.original_size
        largest = max(wanted.resolutions)
        if not wanted.upscale and min(width, height) < largest:
            detail = f"{width}x{height} for {largest}; `upscale: true` takes it"
            batch.rejected.append((place, Rejected(sample.key, "too_small", detail)))
            return
        row = len(batch.pictures)
        boxes = {
            resolution: [
                wanted.box((width, height), resolution, self._generator(place.job, sample.key, crop))
                for crop in range(wanted.crops)
            ]
            for resolution in wanted.resolutions
        }
        for resolution, places in boxes.items():
            pixels = batch.pixels[resolution][row].numpy()
            for crop, box in enumerate(places):
                pixels[crop] = resize(sample.image, box, resolution, sample.original_size, area=wanted.crop in CROPS)
        # JSON and file names can hold lone surrogates, which no UTF-8 column takes.
        key = sample.key.encode("utf-8", "backslashreplace").decode()
        caption = sample.caption.encode("utf-8", "replace").decode()
        batch.pictures.append(Picture(place, key, caption, width, height, boxes))

    def _generator(self, job: Job, key: str, crop: int) -> np.random.Generator:
        """Random crops depend on seed, shard, key and their number alone: not on workers, ranks or restarts."""
        name = f"{job.shard}\0{key}".encode("utf-8", "surrogateescape")
        return np.random.default_rng([self.preparation.seed, zlib.crc32(name), *([crop] if crop else [])])

    def _empty(self) -> Batch:
        shape = self.preparation.batch, self.preparation.crops
        pixels = {r: torch.empty((*shape, r, r, 3), dtype=torch.uint8) for r in self.preparation.resolutions}
        return Batch(pixels, torch.empty(0, dtype=torch.int64), [])

    def _full(self, batch: Batch) -> Batch:
        count = len(batch.pictures)
        if count < self.preparation.batch:
            batch.pixels = {r: pixels[:count].clone() for r, pixels in batch.pixels.items()}
        if self.preparation.tokenize is not None:
            batch.tokens = self.preparation.tokenize([picture.caption for picture in batch.pictures] or [""])[:count]
        return batch


def assign(jobs: list[Job], worker: int, workers: int) -> Iterator[tuple[Job, int, int]]:
    """(job, part, parts) for one worker: whole shards, or every parts-th sample where shards are fewer than workers.

    Reading whole shards lets remote ones be fetched side by side; a part skips the other samples undecoded.
    """
    if len(jobs) >= workers:
        yield from ((job, 0, 1) for job in jobs[worker::workers])
    elif jobs:
        mine = worker % len(jobs)
        yield jobs[mine], worker // len(jobs), len(range(mine, workers, len(jobs)))


def batches(decoder: Decoder, workers: int, prefetch: int, pin: bool) -> Iterator[Batch]:
    """The decoder's batches, prepared ahead by worker processes.

    Raises:
        ValueError: a worker process died.
    """
    loader = DataLoader(
        decoder,
        batch_size=None,
        collate_fn=_same,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin,
        # Where each worker has shards of its own, one that waits for a download must not hold up the others. Parts of
        # one shard come in turn, or the writer would hoard the faster worker's samples.
        in_order=len(decoder.jobs) < workers,
        multiprocessing_context="fork" if workers else None,  # the tokenizer and the sources need not be picklable
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ValueError(
            f"a decoding process died ({' '.join(str(error).split())}); it may have run out of memory, or of shared "
            "memory (/dev/shm; in Docker --shm-size=8g): lower workers, prefetch or batch"
        ) from error


def _same(batch: Batch) -> Batch:
    return batch
