"""Training batches of raw images (and caption tokens) from any source, for the encoders that precompute latents."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.cost import Cost, Epoch, Plan, with_cost
from data.deaths import DecoderDied, keep_alarms, worker_deaths
from data.held import Held
from data.loading import REMEMBERED_POSITIONS, Batch, Loading, Placement, kill_workers, leave_signals, position
from data.log import log
from data.needs import check_pictures
from data.picture_deaths import PictureDeaths
from data.ranges import check_least, check_shares
from data.sources.base import DecodedSample, Rejected, Sample, Source
from data.sources.filters import Filter
from data.transforms import Crop, resize_and_crop, side_needed
from data.word_cache import bound

# Passes in a row without a usable image in a part of the source, after which that is an error. Shards are dealt anew in
# each pass, and one of them may hold none: a damaged tar, or the last images of a set, all of which are too small.
EMPTY_PASSES = 5

StreamPosition = tuple[int, tuple[tuple[int, int], ...]]
"""Number of batches, and per worker the pass and the number of its samples drawn so far."""


def pictures_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Reports that training has no epochs, see `data.cost`."""
    _check(plan.task.requirements(), training=plan.training, **args)
    plan.build(args["filter"])  # which refuses what no sample can pass
    return Cost(epoch=Epoch(None, endless=True))


def _check(
    requirements: dict[str, Any],
    training: bool,
    resolution: int,
    tokens: int | None,
    limit: int,
    shuffle_buffer: int,
    workers: int,
    flip: float,
    word_dropout: float,
    keep_decoded: bool,
    crop: str,
    **others: Any,
) -> None:
    check_least("pictures", 1, resolution=resolution, tokens=tokens, limit=limit)
    check_least("pictures", 0, shuffle_buffer=shuffle_buffer, workers=workers)
    check_shares("pictures", flip=flip, word_dropout=word_dropout)
    if keep_decoded and crop != "center" and training:
        raise ValueError("pictures: keep_decoded holds one crop per image and needs crop: center")
    check_pictures(requirements, resolution, tokens)


@with_cost(pictures_cost)
def pictures(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    source: Annotated[Any, "source"],
    resolution: int,
    filter: Annotated[Any, "filter"] | None = None,
    crop: Literal["center", "random", "dvae", "transformer"] = "center",
    flip: float = 0.0,
    tokens: int | None = None,
    word_dropout: float = 0.0,
    workers: int = 1,
    shuffle_buffer: int = 4096,
    keep_decoded: bool = False,
    limit: int = 4096,
) -> Loading:
    """Reads images from a source; worker processes decode and crop them.

    In training this is an endless stream, so durations are given in batches. A resumed run continues after the last
    batch: it reads the samples of the current pass that were used before, but does not decode them. A validation set is
    read once, into memory; each rank holds its share, and blank images that do not count where another rank holds more.
    Samples that the filter rejects are left out, and their number is logged after one pass.
    A picture of which two processes die that decode it is left out, too, with a line that names it; with workers: 0
    these are two starts of the run.

    Args:
        source: where images and captions come from.
        resolution: side of the square crop in pixels.
        filter: which images are used; null: all that decode.
        crop: at the centre or at a random position (training only), or DALL-E's crops for its dVAE (with flip: 0.5) or
            its transformer (training only), which also vary the size.
        flip: share of images that are flipped horizontally (training only).
        tokens: number of caption tokens, by open_clip's byte-pair tokenizer; null: none.
        word_dropout: probability that a word of a caption is left out, so that the model learns each word (training
            only). At least one word stays.
        workers: number of worker processes that decode; 0 decodes in the training process.
        shuffle_buffer: number of samples within which the order is shuffled, in addition to the order of shards.
        keep_decoded: keep cropped images in memory after the first pass, as uint8; needs crop: center.
        limit: maximum number of images of a validation set, per device.

    Raises:
        ValueError: a number out of range, or images or captions that do not fit the model.
    """
    _check(
        requirements,
        placement.training,
        resolution,
        tokens,
        limit,
        shuffle_buffer,
        workers,
        flip,
        word_dropout,
        keep_decoded,
        crop,
    )
    stream = ImageStream(
        source=source,
        filter=filter or Filter(),
        resolution=resolution,
        crop=crop if placement.training else "center",
        flip=flip if placement.training else 0.0,
        tokens=tokens,
        word_dropout=word_dropout if placement.training else 0.0,
        shuffle_buffer=shuffle_buffer if placement.training else 0,
        keep_decoded=keep_decoded,
        placement=placement,
        workers=workers,
    )
    if not placement.training:
        blank = {"image": torch.zeros(3, resolution, resolution, dtype=torch.uint8)}
        if tokens is not None:
            blank["tokens"] = torch.zeros(tokens, dtype=torch.int64)
        held = Held(list(itertools.islice(stream, limit)), blank)
        own = torch.Generator()  # reading a validation set must not touch the one that noise is drawn from
        return Loading(DataLoader(held, batch_size=placement.batch, pin_memory=placement.pin, generator=own))
    loader = ImageLoader(
        stream,
        batch_size=placement.batch,
        drop_last=True,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=placement.pin,
        worker_init_fn=leave_signals,
        multiprocessing_context="fork" if workers else None,  # they share the memory of `Places`
        generator=torch.Generator(),  # not the one that noise is drawn from
    )
    return Loading(loader)


class ImageLoader(DataLoader):
    """Batches of an `ImageStream` in training, and the position in it; see `Loading`."""

    def __init__(self, dataset: ImageStream, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self._positions = deque([dataset.position()], REMEMBERED_POSITIONS)

    def __iter__(self) -> Iterator[Batch]:
        """The batches after the position. When a worker dies, all are ended, and new ones go on after the last batch.

        Raises:
            ValueError: workers go on to die (see `PictureDeaths.add`).
        """
        deaths, batches = self.dataset.deaths, None
        try:
            while True:
                try:
                    with worker_deaths(deaths.places, self.num_workers):
                        if batches is None:
                            batches = super().__iter__()
                            keep_alarms()
                        batch = next(batches, None)
                except DecoderDied as death:
                    if batches is not None:
                        kill_workers(batches)
                        batches = None
                    deaths.places.forget()
                    deaths.add(death, self.dataset.batches)
                    continue
                if batch is None:
                    return
                self.dataset.note(batch.pop("place"))
                self._positions.append(self.dataset.position())
                yield batch
        finally:
            batches = None  # ends the workers, also while the traceback of a death keeps this frame

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """See `Loading`; ranks gather their positions."""
        return self.dataset.gather(position(self._positions, ahead))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Loading` and `ImageStream.load_state_dict`."""
        self.dataset.load_state_dict(state)
        self._positions.append(self.dataset.position())


@dataclass(eq=False)
class ImageStream(IterableDataset):
    """`image` (3, R, R) uint8 and, if requested, `tokens` (L,) int64; endless in training, once through otherwise.

    Ranks and their workers share the shards if there are enough of them, and the samples otherwise. The order depends
    only on the seed and the pass, and cropping and flipping only on the position in it. So a resumed run continues as
    if it had not been stopped. It reads the samples that it skips, which is at most one pass, but does not decode them
    (with keep_decoded it decodes one pass again).

    In training a sample also has its `place`, (2,) int64: the pass, and the number of its samples drawn so far.
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
            from data.clip_library import open_clip

            self.tokenizer = bound(open_clip.SimpleTokenizer(context_length=self.tokens))
        label = "train" if self.placement.training else "val"
        self.deaths = PictureDeaths(self.placement.output, label, self.source.shards())
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
                raise ValueError(
                    f"part {part[0] + 1} of {part[1]} of the source has no usable image: use fewer workers or ranks"
                )
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
        shards = list(self.source.shards())
        if self.placement.training:
            np.random.default_rng([self.placement.seed, turn]).shuffle(shards)  # the same on every rank
        mine, of = part
        if len(shards) >= of:
            yield from itertools.chain.from_iterable(map(self._read_shard, shards[mine::of]))
        else:
            yield from itertools.islice(itertools.chain.from_iterable(map(self._read_shard, shards)), mine, None, of)

    def _read_shard(self, shard: str) -> Iterator[tuple[str, int, Sample | Rejected]]:
        self.deaths.mark(shard, 0)
        for number, sample in enumerate(self.source.read(shard)):
            yield shard, number, sample
            self.deaths.mark(shard, number + 1)

    def _decode(
        self, shard: str, number: int, sample: Sample | Rejected, rng: np.random.Generator
    ) -> tuple[np.ndarray, str] | Rejected:
        if self.deaths.kills(shard, number):
            return Rejected(sample.key, "kills_decoder", "two processes that decoded it died")
        self.deaths.mark(shard, number, sample.key)
        if isinstance(sample, Sample):
            sample = self.filter.decode(sample, side_needed(self.resolution, self.crop))
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
