"""Precomputed image tokens and raw captions to training batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from data.aliases import InputPath  # noqa: F401 - read from the annotations below
from data.bpe import Vocabulary, check_text
from data.cost import Cost, Plan, with_cost
from data.encoded_sets import manifests_of
from data.epoch import epoch_of
from data.loading import Batch, Loading, Placement
from data.reading import EncodedDataset, open_loader, shared_blocks, streams_of
from data.shared_batches import Specs

NO_TOKEN = -1  # behind the last token of a caption
POWERS_OF_TEN = frozenset(10**digits for digits in range(12))


def tokens_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """The size of an epoch, see `data.cost`. The vocabulary may not have been made yet."""
    path = Path(args["vocabulary"])
    bpe = Vocabulary.read(path) if path.is_file() else None
    needs = check_text(plan.task.requirements(), args["positions"], bpe)
    sets = [(encoded.local, encoded.options["repeat"]) for encoded in plan.build(args["streams"]).values()]
    return Cost(epoch=epoch_of("tokens", sets, args, needs))


@with_cost(tokens_cost)
def tokens(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    streams: dict[str, Annotated[Any, "stream"]],
    resolution: int,
    vocabulary: InputPath,
    positions: int = 256,
    dropout: float = 0.1,
    caption_dropout: float = 0.0,
    expect: dict[str, Any] | None = None,
    workers: int = 2,
    shuffle: bool = True,
    shuffle_algo: Literal["py1e", "py1s", "py1br", "py2s", "naive"] = "py1e",
    shuffle_block: int | None = None,
    predownload: int | None = None,
    cache_limit: str | None = None,
    epoch_size: int | None = None,
    drop_last: bool = True,
) -> Loading:
    """Image tokens that `precompute/encode.py` wrote with a dVAE, and their captions, encoded anew in each epoch.

    What is drawn (which of a picture's crops, which merges are dropped) depends on the seed, the epoch and the sample's
    key alone: not on workers or ranks, and it is the same after a resume. The validation set is read once in order,
    with the first crop and without dropout.

    Args:
        streams: encoded sets by label; with proportions, all of them must have one.
        resolution: which of the encoded resolutions to read, in pixels.
        vocabulary: file that `precompute/vocabulary.py` wrote.
        positions: text tokens of a sample, those that are missing included; longer captions are cut, and counted.
        dropout: probability that a merge of the caption's encoding is left out (BPE dropout; training only).
        caption_dropout: share of captions replaced by the empty one, for guidance (training only).
        expect: fields that the manifest must have these values in (see `Manifest.check`), beside what the model needs.
        workers: processes that read.
        shuffle: mix the order each epoch (training only).
        shuffle_algo: the library's algorithm.
        shuffle_block: samples that shard parts are mixed over; null: the library's default.
        predownload: samples fetched ahead by a worker; null: the library's default.
        cache_limit: local disk space for remote shards, such as 100gb; null: no limit.
        epoch_size: samples of an epoch; null: all.
        drop_last: leave out the last, incomplete batch of an epoch (training only).

    Raises:
        FileNotFoundError: a stream without a manifest, or no vocabulary.
        ValueError: a manifest or a vocabulary that does not fit the recipe, by field.
    """
    for name, share in (("dropout", dropout), ("caption_dropout", caption_dropout)):
        if not 0 <= share <= 1:
            raise ValueError(f"tokens: {name} is a share from 0 to 1, got {share}")
    if positions < 1:
        raise ValueError(f"tokens: positions is {positions}; give 1 or more")
    bpe = Vocabulary.read(vocabulary)
    needs = check_text(requirements, positions, bpe)
    manifests = manifests_of("tokens", streams)
    first = manifests[0]
    for manifest in manifests:
        manifest.check(resolution=resolution, **needs, **(expect or {}))
        manifest.check(image_weights=first.image_encoder["weights_hash"])
    dataset = TokenDataset(
        streams=streams_of(streams),
        resolution=resolution,
        vocabulary=bpe,
        positions=positions,
        dropout=dropout if placement.training else 0.0,
        caption_dropout=caption_dropout if placement.training else 0.0,
        draw_crop=placement.training,
        report=placement.rank == 0,
        blocks=shared_blocks(workers),
        batch_size=placement.batch,
        shuffle=shuffle and placement.training,
        shuffle_algo=shuffle_algo,
        shuffle_seed=placement.seed,
        shuffle_block_size=shuffle_block,
        predownload=predownload,
        cache_limit=cache_limit,
        epoch_size=epoch_size,
    )
    return Loading(
        open_loader(dataset, placement, workers, drop_last),
        widen,
        samples=dataset.size,
        manifest=first,
        resolution=resolution,
        vocabulary=Path(vocabulary),
    )


class TokenDataset(EncodedDataset):
    """Tokens of one crop of each picture, and of its caption.

    Args:
        resolution: which of the encoded resolutions to read, in pixels.
        vocabulary: encodes captions.
        positions: T, text tokens of a sample.
        dropout: probability that a merge is left out.
        caption_dropout: share of captions that become empty.
        draw_crop: draw one of the crops; false takes the first.
        report: print how many captions were too long.
        arguments: of EncodedDataset.
    """

    def __init__(
        self,
        *,
        resolution: int,
        vocabulary: Vocabulary,
        positions: int,
        dropout: float,
        caption_dropout: float,
        draw_crop: bool,
        report: bool,
        **arguments: Any,
    ) -> None:
        self.vocabulary = vocabulary
        self.positions = positions
        self.dropout = dropout
        self.caption_dropout = caption_dropout
        self.draw_crop = draw_crop
        self.report = report
        self.captions = self.cut = 0  # seen by this process, and those of them that were too long
        super().__init__(columns={"tokens": f"tokens_{resolution}"}, texts=("key", "caption"), **arguments)

    def specs(self, samples: int) -> Specs:
        """See `EncodedDataset.specs`."""
        count = self.arrays["tokens"].shape[1]
        return {"text": ((samples, self.positions), torch.int32), "image": ((samples, count), torch.int32)}

    def read(self, numbers: Sequence[int]) -> Batch:
        """See `EncodedDataset.read`.

        Returns:
            `text` (B, T), in which -1 stands behind the last token, and `image` (B, N) in raster order, int32. In a
            worker process they lie in shared memory.
        """
        batch = self.blocks.new(self.specs(len(numbers)))
        text, image = batch["text"].numpy(), batch["image"].numpy()
        text[:] = NO_TOKEN
        stored = self.arrays["tokens"]
        crops = torch.empty((len(numbers), *stored.shape), dtype=stored.dtype)  # BCN uint16
        tokens = crops.numpy()
        for row, (key, caption) in enumerate(self.fill(numbers, {"tokens": crops})):
            draws = random.Random(sample_seed(self.shuffle_seed, self.epoch, key))
            crop = draws.randrange(len(tokens[row])) if self.draw_crop else 0
            image[row] = tokens[row, crop]
            found = self._encode(caption, draws, key)
            text[row, : len(found)] = found
        return batch

    def _encode(self, caption: str, draws: random.Random, key: str) -> list[int]:
        if self.caption_dropout and draws.random() < self.caption_dropout:
            return []
        found = self.vocabulary.encode(caption, self.dropout, draws)
        self.captions += 1
        if len(found) > self.positions:
            self.cut += 1
            if self.report and self.cut in POWERS_OF_TEN:  # seen, and not a line a sample
                print(
                    f"tokens: {self.cut:,} of {self.captions:,} captions that this process read were cut to "
                    f"{self.positions} tokens; the last one, of {key}, has {len(found)}",
                    flush=True,
                )
        return found[: self.positions]


def widen(batch: Batch) -> Batch:
    """To int64, which embeddings and losses take; on the device, so that half as much is copied to it."""
    return {name: tensor.long() for name, tensor in batch.items()}


def sample_seed(seed: int, epoch: int, key: str) -> int:
    """What a sample's draws in an epoch start from: the same on every machine and after a resume."""
    text = f"{seed}\0{epoch}\0{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
