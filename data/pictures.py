"""Training batches of raw images (and caption tokens) from any source, for the encoders that precompute latents."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from torch.utils.data import DataLoader

from data.cost import Cost, Epoch, Plan, with_cost
from data.image_stream import ImageStream, NotRead
from data.loading import REMEMBERED_POSITIONS, Batch, Loading, Placement, kill_workers, leave_signals, position
from data.model_requirements import check_pictures
from data.padded_dataset import PaddedDataset
from data.ranges import check_least, check_shares
from data.sources.filters import Filter
from data.workers.deaths import DecoderDied, keep_alarms, worker_deaths


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
        resolution: side of the square crop in pixels. Smaller images are enlarged, unless the filter's min_side leaves
            them out.
        filter: which images are used; null: all that decode and have a caption.
        crop: at the centre or at a random position (training only), or DALL-E's crops for its dVAE (with flip: 0.5) or
            its transformer (training only), which also vary the size.
        flip: share of images that are flipped horizontally (training only).
        tokens: number of caption tokens, by open_clip's byte-pair tokenizer; null: none.
        word_dropout: probability that a word of a caption is left out, so that the model learns each word (training
            only). At least one word stays.
        workers: number of worker processes that decode; 0 decodes in the training process. If the workers of all ranks
            are more than the shards of the source, each of them reads the whole source in each pass.
        shuffle_buffer: number of samples within which the order is shuffled, in addition to the order of shards.
        keep_decoded: keep cropped images in memory after the first pass, as uint8; needs crop: center.
        limit: maximum number of images of a validation set, per device.

    Raises:
        ValueError: a number out of range, images or captions that do not fit the model, or a validation set that cannot
            be read.
        Outage: the store or server of a validation set does not answer.
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
        try:
            samples = list(itertools.islice(stream, limit))
        except NotRead as error:
            raise error.error() from error
        held = PaddedDataset(samples, blank)
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
            ValueError: workers go on to die (see `PictureDeaths.add`), or the source cannot be read.
            Outage: its store or server does not answer.
        """
        deaths, batches = self.dataset.deaths, None
        try:
            while True:
                try:
                    with worker_deaths(deaths.places, self.num_workers):
                        if batches is None:
                            batches = super().__iter__()
                            keep_alarms()
                        batch = next(batches)  # there is one: the stream is endless
                except DecoderDied as death:
                    if batches is not None:
                        kill_workers(batches)
                        batches = None
                    deaths.places.forget()
                    deaths.add(death, self.dataset.batches)
                    continue
                self.dataset.note(batch.pop("place"))
                self._positions.append(self.dataset.position())
                yield batch
        except NotRead as error:
            raise error.error() from None
        finally:
            batches = None  # ends the workers, also while the traceback of a death keeps this frame

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """See `Loading`; ranks gather their positions."""
        return self.dataset.gather(position(self._positions, ahead))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Loading` and `ImageStream.load_state_dict`."""
        self.dataset.load_state_dict(state)
        self._positions.append(self.dataset.position())
