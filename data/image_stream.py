"""Images of a source as an endless stream that several ranks and workers share, and that a resumed run continues."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from data.loading import Placement
from data.sources.base import DecodedSample, Rejected, Sample, Source, samples_of, shards_of
from data.sources.filters import Filter, decoded
from data.system.disk_errors import disk_error, disk_line, may_pass
from data.system.errors import Outage, WorkersError, WrongResult, with_place
from data.system.log import log
from data.tokenizers.clip_words import bound
from data.transforms import Crop, resize_and_crop, side_needed
from data.workers.picture_deaths import PictureDeaths

# Passes in a row without a usable image in a part of the source, after which that is an error. Shards are dealt anew in
# each pass, and one of them may hold none: a damaged tar, or the last images of a set, all of which are too small.
EMPTY_PASSES = 5

StreamPosition = tuple[int, tuple[tuple[int, int], ...]]
"""Number of batches, and per worker the pass and the number of its samples drawn so far."""


class NotRead(WorkersError, ValueError):
    """A shard of the source could not be read, or no image of it can be used."""

    def error(self) -> ValueError:
        """What ends a run by it, also where it comes from a worker process: one line."""
        return ValueError(self.line)


class NotAnswered(NotRead):
    """The source's store or server did not answer, and later may."""

    def error(self) -> Outage:
        return Outage(self.line)


@dataclass(eq=False)
class ImageStream(IterableDataset):
    """`image` (3, R, R) uint8 and, if requested, `tokens` (L,) int64; endless in training, once through otherwise.

    Ranks and their workers share the shards if there are enough of them, and the samples otherwise, or with
    keep_decoded: each worker then reads all shards and decodes its samples. The order depends only on the seed and the
    pass, and cropping and flipping only on the position in it. So a resumed run continues as if it had not been
    stopped. It reads the samples that it skips, which is at most one pass, but does not decode them (with keep_decoded
    it decodes one pass again).

    In training a sample also has its `place`, (2,) int64: the pass, and the number of its samples drawn so far.

    Raises:
        NotRead: by its iterators, which worker processes use.
    """

    source: Source
    filter: Filter
    resolution: int
    crop: Crop
    flip: float
    tokens: int | None
    word_dropout: float
    shuffle_buffer: int
    keep_decoded: bool
    placement: Placement
    workers: InitVar[int]

    def __post_init__(self, workers: int) -> None:
        self.tokenizer = None
        if self.tokens is not None:
            # Here rather than in each worker process, where the import would take 13 s of CPU time.
            from data.tokenizers.clip_library import open_clip

            self.tokenizer = bound(open_clip.SimpleTokenizer(context_length=self.tokens))
        label, shards = "train" if self.placement.training else "val", shards_of(self.source)
        readers = self.placement.world * max(1, workers)
        if self.placement.training and not self.keep_decoded and len(shards) < readers:
            log.warning(
                f"pictures: {readers} workers on all ranks share {len(shards)} shards, so each worker reads all of "
                "them in each pass: use fewer workers, or a source with more shards"
            )
        self.deaths = PictureDeaths(self.placement.output, label, shards)
        self.batches = 0  # taken by the training process
        self.places = [(0, 0)] * max(1, workers)  # of each worker, after the last batch that was taken from it

    def note(self, place: torch.Tensor) -> None:
        """Records the places (B, 2) of the samples of a batch that was taken. Workers give batches in turn."""
        turn, drawn = place[-1].tolist()
        self.places[self.batches % len(self.places)] = (turn, drawn)
        self.batches += 1

    def position(self) -> StreamPosition:
        """The position after the last batch that was noted, on this rank."""
        return self.batches, tuple(self.places)

    def gather(self, position: StreamPosition) -> dict[str, Any]:
        """A state for `load_state_dict` from the position of each rank; call it on all of them."""
        batches, places = position
        ranks = [list(places)]
        if torch.distributed.is_initialized():
            ranks = [[] for _ in range(self.placement.world)]
            torch.distributed.all_gather_object(ranks, list(places))
        return {"batches": batches, "places": ranks}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The state that Composer keeps in a checkpoint; its count of samples is not needed."""
        return self.gather(self.position())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after a checkpoint's last batch; with other numbers of ranks or workers, at the start of a pass."""
        ranks = state["places"]
        if len(ranks) == self.placement.world and len(ranks[0]) == len(self.places):
            self.batches = state["batches"]
            self.places = [tuple(place) for place in ranks[self.placement.rank]]
        else:
            turn = 1 + max(turn for places in ranks for turn, _ in places)
            self.places = [(turn, 0)] * len(self.places)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = self._samples()
        try:
            while True:
                with self.deaths.noted():
                    sample = next(samples, None)
                if sample is None:
                    return
                yield sample
        finally:
            self.deaths.close()

    def _samples(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        worker = (worker + self.batches) % workers  # a new loader asks its first worker first
        part = self.placement.rank * workers + worker, self.placement.world * workers
        turn, drawn = self.places[worker]
        empty = 0
        kept: list[tuple[np.ndarray, str]] = []
        if self.keep_decoded and turn:
            kept = [picture for _, _, picture in self._pass(0, part, kept, 0) if picture is not None]
        while True:
            found = drawn
            for number, rng, picture in self._pass(turn, part, kept, drawn):
                if picture is None:
                    continue
                if self.keep_decoded and not turn:
                    kept.append(picture)
                if number < drawn:
                    continue
                found += 1
                pixels, caption = picture
                if self.flip and rng.random() < self.flip:
                    pixels = pixels[:, ::-1]
                sample = {"image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))}
                if self.tokenizer is not None:
                    sample["tokens"] = self.tokenizer([with_fewer_words(caption, self.word_dropout, rng)])[0]
                if self.placement.training:
                    sample["place"] = torch.tensor([turn, number + 1])
                yield sample
            if not self.placement.training:
                return
            empty = 0 if found else empty + 1
            if empty == EMPTY_PASSES:
                what = "use fewer workers or ranks" if part[1] > 1 else "check it, its captions and the filter"
                raise NotRead(f"part {part[0] + 1} of {part[1]} of the source has no usable image: {what}")
            turn, drawn = turn + 1, 0

    def _pass(
        self, turn: int, part: tuple[int, int], kept: list, drawn: int
    ) -> Iterator[tuple[int, np.random.Generator, tuple[np.ndarray, str] | None]]:
        """One pass over this part, in training order.

        Yields:
            The sample's number, its own generator, and (pixels (R, R, 3) uint8, caption), or None if it was rejected.
            The first `drawn` samples are left out without decoding, unless decoded images are kept.
        """
        seed = [self.placement.seed, turn, *part]
        order = np.random.default_rng(seed)
        again = bool(turn) and self.keep_decoded
        samples = (
            (kept[i] for i in order.permutation(len(kept))) if again else self._mixed(self._read(turn, part), order)
        )
        rejected: dict[str, int] = {}
        number = -1
        for number, sample in enumerate(samples):
            if number < drawn and (again or not self.keep_decoded):
                continue
            rng = np.random.default_rng([*seed, number])
            picture = sample if again else self._decode(*sample, rng)
            if isinstance(picture, Rejected):
                rejected[picture.reason] = rejected.get(picture.reason, 0) + 1
                picture = None
            yield number, rng, picture
        if rejected and turn == 0:
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
            log.info(f"pictures: left out {sum(rejected.values())} of {number + 1} samples: {counts}")

    def _read(self, turn: int, part: tuple[int, int]) -> Iterator[tuple[str, int, Sample | Rejected]]:
        """(shard, number in it, sample) of this part's samples in stored order, shard after shard."""
        shards = shards_of(self.source)
        if self.placement.training:
            np.random.default_rng([self.placement.seed, turn]).shuffle(shards)  # the same on every rank
        mine, of = part
        # Decoded images stay where they were first: parts of whole shards would differ in size for good, and the
        # images of the smaller ones would be drawn more often.
        if len(shards) >= of and not self.keep_decoded:
            yield from itertools.chain.from_iterable(map(self._read_shard, shards[mine::of]))
        else:
            yield from itertools.islice(itertools.chain.from_iterable(map(self._read_shard, shards)), mine, None, of)

    def _read_shard(self, shard: str) -> Iterator[tuple[str, int, Sample | Rejected]]:
        self.deaths.mark(shard, 0)
        try:
            for number, sample in enumerate(samples_of(self.source, shard)):
                yield shard, number, sample
                self.deaths.mark(shard, number + 1)
        except (OSError, ValueError) as error:
            of_disk = disk_error(error)
            kind = NotAnswered if may_pass(error) else NotRead
            raise kind(with_place(error) if of_disk is None else disk_line(of_disk)) from error

    def _decode(
        self, shard: str, number: int, sample: Sample | Rejected, rng: np.random.Generator
    ) -> tuple[np.ndarray, str] | Rejected:
        if self.deaths.kills(shard, number):
            return Rejected(sample.key, "kills_decoder", "two processes that decoded it died")
        self.deaths.mark(shard, number, sample.key)
        if isinstance(sample, Sample):
            try:
                sample = decoded(self.filter, sample, side_needed(self.resolution, self.crop))
            except WrongResult as error:
                raise NotRead(error.line) from error
        if not isinstance(sample, DecodedSample):
            return sample
        return resize_and_crop(sample.image, self.resolution, self.crop, rng, sample.original_size), sample.caption

    def _mixed(self, samples: Iterator, rng: np.random.Generator) -> Iterator:
        """Shuffles within a buffer of stored samples, which are smaller than decoded images."""
        if not self.shuffle_buffer:
            yield from samples
            return
        buffer: list = []
        for sample in samples:
            if len(buffer) < self.shuffle_buffer:
                buffer.append(sample)
                continue
            place = rng.integers(len(buffer))
            buffer[place], sample = sample, buffer[place]
            yield sample
        rng.shuffle(buffer)
        yield from buffer


def with_fewer_words(caption: str, dropout: float, rng: np.random.Generator) -> str:
    """A caption whose words are each left out with a probability; one of them stays at least.

    Args:
        caption: words, separated by white space.
        dropout: the probability. 0 draws no numbers, and returns the caption as it is.
        rng: of the sample.
    """
    words = caption.split()
    if not dropout or not words:
        return caption
    kept = [word for word, draw in zip(words, rng.random(len(words)), strict=True) if draw >= dropout]
    return " ".join(kept or [words[rng.integers(len(words))]])
