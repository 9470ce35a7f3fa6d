"""Batches of raw pictures (and caption tokens) from any source, to train the encoders that precompute latents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.crops import CROPS, LARGEST
from data.loading import Loading, Placement
from data.sources.base import DecodedSample, Rejected, Source
from data.sources.filters import Filter
from data.transforms import resize, resize_and_crop


def pictures(
    placement: Placement,
    *,
    source: Annotated[Any, "source"],
    resolution: int,
    filter: Annotated[Any, "filter"] | None = None,
    crop: Literal["center", "random", "dvae", "transformer"] = "center",
    flip: float = 0.0,
    tokens: int | None = None,
    workers: int = 1,
    shuffle_buffer: int = 4096,
    keep_decoded: bool = False,
    limit: int = 4096,
) -> Loading:
    """Pictures straight from a source, decoded and cropped by worker processes.

    Training is an endless stream: give durations in batches. A validation set is read once, into memory. Samples that
    the filter rejects are left out, and counted when the set was read once.

    Args:
        source: where pictures and captions come from.
        resolution: side of the square crop in pixels.
        filter: which pictures are fit; null: all that decode.
        crop: centre of the picture, or anywhere (training only), or DALL-E's crops for its dVAE (with flip: 0.5) or its
            transformer (training only), which vary the size too.
        flip: share of pictures mirrored (training only).
        tokens: length of the caption's tokens by open_clip's byte-pair tokenizer; null gives no tokens.
        workers: processes that decode; 0 decodes in the training process.
        shuffle_buffer: samples that the order is mixed over, beside the order of the shards.
        keep_decoded: hold cropped pictures in memory after the first pass, as 8-bit; needs crop: center.
        limit: most pictures of a validation set, on each device.
    """
    if keep_decoded and crop != "center" and placement.training:
        raise ValueError("pictures: keep_decoded holds one crop of each picture and needs crop: center")
    stream = PictureStream(
        source=source,
        filter=filter or Filter(),
        resolution=resolution,
        crop=crop if placement.training else "center",
        flip=flip if placement.training else 0.0,
        tokens=tokens,
        shuffle_buffer=shuffle_buffer if placement.training else 0,
        keep_decoded=keep_decoded,
        placement=placement,
    )
    if not placement.training:
        held = list(itertools.islice(stream, limit))
        own = torch.Generator()  # reading a validation set must not touch the one that noise is drawn from
        return Loading(DataLoader(held, batch_size=placement.batch, pin_memory=placement.pin, generator=own))
    loader = DataLoader(
        stream,
        batch_size=placement.batch,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        pin_memory=placement.pin,
        generator=torch.Generator(),  # not the one that noise is drawn from
    )
    return Loading(loader)


class PictureStream(IterableDataset):
    """`image` (3, R, R) uint8 and, if asked for, `tokens` (L,) int64; endless in training, once through otherwise.

    Shards are dealt to ranks and their workers where there are enough of them, samples otherwise. The order depends on
    the seed and the pass alone, so that a resumed run which skips what it has seen goes on as if never stopped.
    """

    def __init__(
        self,
        source: Source,
        filter: Filter,
        resolution: int,
        crop: Literal["center", "random", "dvae", "transformer"],
        flip: float,
        tokens: int | None,
        shuffle_buffer: int,
        keep_decoded: bool,
        placement: Placement,
    ) -> None:
        self.source = source
        self.filter = filter
        self.resolution = resolution
        self.crop = crop
        self.flip = flip
        self.tokens = tokens
        self.shuffle_buffer = shuffle_buffer
        self.keep_decoded = keep_decoded
        self.placement = placement

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part = self.placement.rank * workers + worker, self.placement.world * workers
        tokenizer = None
        if self.tokens is not None:
            from open_clip.tokenizer import SimpleTokenizer

            tokenizer = SimpleTokenizer(context_length=self.tokens)
        kept: list[tuple[np.ndarray, str]] = []
        turn = 0
        while True:
            rng = np.random.default_rng([self.placement.seed, turn, *part])
            found = 0
            for pixels, caption in self._shuffled(self._pass(turn, part, kept, rng), rng):
                found += 1
                if self.flip and rng.random() < self.flip:
                    pixels = pixels[:, ::-1]
                sample = {"image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))}
                if tokenizer is not None:
                    sample["tokens"] = tokenizer([caption])[0]
                yield sample
            if not self.placement.training:
                return
            if not found:
                raise ValueError(
                    f"part {part[0] + 1} of {part[1]} of the source has no fit picture: use fewer workers or ranks"
                )
            turn += 1

    def _pass(
        self, turn: int, part: tuple[int, int], kept: list, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, str]]:
        """One pass over this part: (pixels (R, R, 3) uint8, caption)."""
        if kept:
            for index in rng.permutation(len(kept)):
                yield kept[index]
            return
        shards = list(self.source.shards())
        if self.placement.training:
            np.random.default_rng([self.placement.seed, turn]).shuffle(shards)  # the same on every rank
        mine, of = part
        by_shard = len(shards) >= of
        needed = round(LARGEST * self.resolution) if self.crop in CROPS else self.resolution
        rejected: dict[str, int] = {}
        number = 0
        for shard in shards[mine::of] if by_shard else shards:
            for sample in self.source.read(shard):
                number += 1
                if not by_shard and number % of != mine:
                    continue
                decoded = sample if isinstance(sample, Rejected) else self.filter.decode(sample, needed)
                if isinstance(decoded, DecodedSample):
                    pixels = self._cut(decoded, rng)
                    if self.keep_decoded:
                        kept.append((pixels, decoded.caption))
                    yield pixels, decoded.caption
                else:
                    rejected[decoded.reason] = rejected.get(decoded.reason, 0) + 1
        if rejected and turn == 0:
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
            print(f"pictures: left out {sum(rejected.values())} of {number} samples: {counts}", flush=True)

    def _cut(self, picture: DecodedSample, rng: np.random.Generator) -> np.ndarray:
        """The square that is trained on, (R, R, 3) uint8."""
        if self.crop in CROPS:
            box = CROPS[self.crop](picture.original_size, self.resolution, rng)
            return resize(picture.image, box, self.resolution, picture.original_size, area=True)
        return resize_and_crop(picture.image, self.resolution, self.crop, rng, picture.original_size)[0]

    def _shuffled(self, samples: Iterator, rng: np.random.Generator) -> Iterator:
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
