"""Training batches of precomputed image tokens and of captions, which are encoded here."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from data.aliases import InputPath
from data.cost import Cost, Plan, with_cost
from data.encoded.column_reader import DamagedError, StoredSample
from data.encoded.dataset import EncodedDataset, copy_rows, dataset_arguments, open_loader
from data.encoded.epoch_size import encoded_samples, epoch_of
from data.encoded.sets import first_manifest
from data.encoded.shared_batches import Specs
from data.loading import Batch, Loading, Placement
from data.ranges import check_least, check_reading, check_shares
from data.system.log import log
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.vocabulary_files import VocabularyFile

NO_TOKEN = -1  # after the last token of a caption
POWERS_OF_TEN = frozenset(10**digits for digits in range(12))


def tokens_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """The size of an epoch, see `data.cost`. The vocabulary may not have been made yet."""
    check_shares("tokens", dropout=args["dropout"], caption_dropout=args["caption_dropout"])
    check_least("tokens", 1, positions=args["positions"])
    check_reading("tokens", **args)
    path = Path(args["vocabulary"])
    bpe = Vocabulary.read(path) if path.is_file() else None
    needs = _check_text(plan.task.requirements(), args["positions"], bpe)
    stored = partial(encoded_samples, "tokens", args, needs)
    return Cost(epoch=epoch_of("tokens", plan.build(args["streams"]), args, stored))


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
    """Reads image tokens that `precompute/encode.py` wrote with a dVAE, and encodes their captions in each epoch.

    The random choices (of one of an image's crops, and of the merges that are dropped) depend only on the seed, the
    epoch and the sample's key. They do not depend on workers or ranks, and are the same after a resume. A validation
    set is read once in stored order, with the first crop and without dropout.

    Args:
        streams: encoded sets by label. If one of them has a proportion, all must have one.
        resolution: the encoded resolution that is read, in pixels.
        vocabulary: file of the vocabulary that `precompute/vocabulary.py` wrote.
        positions: number of text positions per sample. Longer captions are cut, and counted.
        dropout: probability that a merge is left out when a caption is encoded (BPE dropout; training only).
        caption_dropout: share of captions that are replaced by the empty one, for guidance (training only).
        expect: values that the manifest must have, such as {codes: 8192}, in addition to those that the model needs.
        workers: number of worker processes that read.
        shuffle: shuffle the samples in each epoch (training only).
        shuffle_algo: streaming's shuffling algorithm; py1s and py2s repeat up to 16 samples of an epoch per machine,
            and leave out as many.
        shuffle_block: number of samples within which parts of shards are shuffled; null: streaming's default.
        predownload: number of samples that each worker fetches ahead; null: streaming's default.
        cache_limit: local disk space for remote shards, such as 100gb; null: no limit.
        epoch_size: number of samples per epoch; null: all.
        drop_last: leave out an incomplete last batch of an epoch (training only).

    Raises:
        FileNotFoundError: a stream has no manifest, or there is no vocabulary.
        ValueError: a manifest or the vocabulary does not fit the recipe.
    """
    check_shares("tokens", dropout=dropout, caption_dropout=caption_dropout)
    check_least("tokens", 1, positions=positions)
    bpe = Vocabulary.read(vocabulary)
    needs = _check_text(requirements, positions, bpe)
    manifest = first_manifest("tokens", streams, epoch_size, resolution, needs, expect)
    dataset = TokenDataset(
        resolution=resolution,
        vocabulary=bpe,
        positions=positions,
        dropout=dropout if placement.training else 0.0,
        caption_dropout=caption_dropout if placement.training else 0.0,
        draw_crop=placement.training,
        codes=manifest.image_encoder["codes"],
        **dataset_arguments(
            "tokens",
            streams,
            placement,
            workers,
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_block=shuffle_block,
            predownload=predownload,
            cache_limit=cache_limit,
            epoch_size=epoch_size,
        ),
    )
    dataset.check_shapes(whole=True, tokens=(manifest.crops, manifest.side(resolution) ** 2))
    return Loading(
        open_loader(dataset, placement, workers, drop_last),
        widen,
        samples=int(dataset.epoch_size),
        images=int(dataset.num_samples),
        manifest=manifest,
        resolution=resolution,
        vocabulary=VocabularyFile.read(vocabulary),
    )


def _check_text(requirements: dict[str, Any], positions: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Compares the text of token data with what a model needs.

    Args:
        requirements: what the model needs; text_positions and text_vocabulary are compared.
        positions: number of text tokens per sample.
        vocabulary: the data's vocabulary; None if it does not exist yet, as in a dry run.

    Returns:
        The other requirements, which the encoded set's manifest must fit.

    Raises:
        ValueError: the text does not fit the model.
    """
    wanted = requirements.get("text_positions", positions)
    if wanted != positions:
        raise ValueError(
            f"tokens: text_positions is {positions}, the recipe expects {wanted}; give data.positions the model's "
            "number of text positions"
        )
    if vocabulary is not None and (wanted := requirements.get("text_vocabulary", vocabulary.size)) != vocabulary.size:
        raise ValueError(
            f"{vocabulary.where}: text_vocabulary is {vocabulary.size}, the recipe expects {wanted}; give the model as "
            "many text tokens as the vocabulary has entries, or train another with precompute/vocabulary.py"
        )
    return {name: value for name, value in requirements.items() if name not in ("text_positions", "text_vocabulary")}


class TokenDataset(EncodedDataset):
    """Tokens of one crop per image, and of its caption.

    Args:
        resolution: the encoded resolution that is read, in pixels.
        vocabulary: encodes captions.
        positions: T, number of text positions per sample.
        dropout: probability that a merge is left out.
        caption_dropout: share of captions that are replaced by the empty one.
        draw_crop: choose one of the crops at random; false takes the first.
        codes: number of codes of the dVAE, below which tokens must be; None: they are not compared.
        arguments: of `EncodedDataset`.
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
        codes: int | None = None,
        **arguments: Any,
    ) -> None:
        self.vocabulary = vocabulary
        self.positions = positions
        self.dropout = dropout
        self.caption_dropout = caption_dropout
        self.draw_crop = draw_crop
        self.codes = codes
        self.captions = self.cut = 0  # encoded by this process, and how many of them were too long
        super().__init__(columns={"tokens": f"tokens_{resolution}"}, texts=("key", "caption"), **arguments)

    def specs(self, samples: int) -> Specs:
        """See `EncodedDataset.specs`."""
        count = prod(self.arrays["tokens"].shape[1:])
        return {"text": ((samples, self.positions), torch.int32), "image": ((samples, count), torch.int32)}

    def collate(self, samples: Sequence[StoredSample]) -> Batch:
        """See `EncodedDataset.collate`.

        Returns:
            `text` (B, T) int32, with -1 after the last token, and `image` (B, N) int32 in raster order.

        Raises:
            DamagedError: a sample has a code that the dVAE does not have. A GPU would say nothing that names it.
        """
        batch = self.new_batch(samples)
        text, image = batch["text"].numpy(), batch["image"].numpy()
        text[:] = NO_TOKEN
        stored, epoch = self.arrays["tokens"], self.epoch
        crops = torch.empty((len(samples), *stored.shape), dtype=stored.dtype)  # (B, crops, N) uint16
        copy_rows(samples, {"tokens": crops})
        tokens = crops.numpy()
        for row, sample in enumerate(samples):
            key, caption = sample.texts
            draws = random.Random(sample_seed(self.shuffle_seed, epoch, key))
            crop = draws.randrange(len(tokens[row])) if self.draw_crop else 0
            image[row] = tokens[row, crop]
            if self.codes is not None and not 0 <= image[row].min() <= image[row].max() < self.codes:
                raise DamagedError(
                    f"tokens: {key} has codes from {image[row].min()} to {image[row].max()}, its dVAE has {self.codes} "
                    "codes from 0; encode the set again"
                )
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
            if self.cut in POWERS_OF_TEN:  # noticed, but not one line per caption
                log.info(
                    f"tokens: {self.cut:,} of {self.captions:,} captions that this process read were cut to "
                    f"{self.positions} tokens; the last one, of {key}, has {len(found)}"
                )
        return found[: self.positions]


def widen(batch: Batch) -> Batch:
    """Converts tokens to int64, which embeddings and losses need; on the device, so that half as many bytes are copied.

    What is not tokens stays as it is, see `data.loading.Loading`.
    """
    return {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in batch.items()}


def sample_seed(seed: int, epoch: int, key: str) -> int:
    """The seed of a sample's random choices in an epoch: the same on every machine and after a resume."""
    text = f"{seed}\0{epoch}\0{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
