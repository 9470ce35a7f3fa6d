"""Training batches of packed texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from data.cost import Cost, Plan, with_cost
from data.encoded.column_reader import DamagedError, StoredSample
from data.encoded.dataset import EncodedDataset, copy_rows, dataset_arguments, open_loader
from data.encoded.epoch_size import epoch_of
from data.encoded.sets import check_sets
from data.encoded.shared_batches import Specs
from data.encoded.text_manifest import NAME, TextManifest
from data.loading import Batch, Loading, Placement
from data.model_requirements import check_kind
from data.ranges import check_reading
from data.tokenizers.vocabulary_files import VOCABULARY, VocabularyFile
from data.tokens import widen


def texts_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """The size of an epoch, see `data.cost`."""
    check_reading("texts", **args)
    sets = plan.build(args["streams"])
    check_sets("texts", sets, args["epoch_size"])
    here = {label: path for label, encoded in sets.items() if (path := Path(encoded.local, NAME)).is_file()}
    manifests = _manifests(here, plan.task.requirements())
    samples = {here[label].parent: manifest.samples for label, manifest in manifests.items()}
    return Cost(epoch=epoch_of("texts", sets, args, samples.get))


def _manifests(paths: Mapping[str, Path], requirements: dict[str, Any]) -> dict[str, TextManifest]:
    """The manifests of sets, by label.

    Raises:
        ValueError: texts that do not fit the model, or of several vocabularies.
    """
    check_kind("texts", requirements, ("positions", "vocabulary"))
    manifests = {label: TextManifest.read(path) for label, path in paths.items()}
    for label, manifest in manifests.items():
        manifest.check(paths[label], **requirements)
        first = next(iter(manifests))
        if manifest.vocabulary_hash != manifests[first].vocabulary_hash:
            raise ValueError(
                f"texts: streams.{label} was packed with another vocabulary than streams.{first}; pack one of them "
                "again"
            )
    return manifests


def _vocabulary(path: Path, manifest: TextManifest) -> VocabularyFile:
    """The vocabulary beside packed texts, which an export of the run gets.

    Raises:
        ValueError: it is not the one that the texts were packed with.
    """
    found = VocabularyFile.read(path)
    if found.sha256 != manifest.vocabulary_hash:
        raise ValueError(f"{path}: damaged, or of other texts: its sha256 is not the one in {NAME}; copy the set again")
    return found


@with_cost(texts_cost)
def texts(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    streams: dict[str, Annotated[Any, "stream"]],
    workers: int = 2,
    shuffle: bool = True,
    shuffle_algo: Literal["py1e", "py1s", "py1br", "py2s", "naive"] = "py1e",
    shuffle_block: int | None = None,
    predownload: int | None = None,
    cache_limit: str | None = None,
    epoch_size: int | None = None,
    drop_last: bool = True,
) -> Loading:
    """Reads rows of tokens that `precompute/pack.py` wrote. A validation set is read once in stored order.

    Args:
        streams: sets of packed texts by label. If one of them has a proportion, all must have one.
        workers: number of worker processes that read.
        shuffle: shuffle the rows in each epoch (training only).
        shuffle_algo: streaming's shuffling algorithm; py1s and py2s repeat up to 16 samples of an epoch per machine,
            and leave out as many.
        shuffle_block: number of rows within which parts of shards are shuffled; null: streaming's default.
        predownload: number of rows that each worker fetches ahead; null: streaming's default.
        cache_limit: local disk space for remote shards, such as 100gb; null: no limit.
        epoch_size: number of rows per epoch; null: all.
        drop_last: leave out an incomplete last batch of an epoch (training only).

    Raises:
        FileNotFoundError: a stream has no manifest.
        ValueError: no stream, proportions of only some, texts that do not fit the model, streams of several
            vocabularies, or a vocabulary that is not theirs.
    """
    check_sets("texts", streams, epoch_size)
    manifests = _manifests({label: encoded.current(NAME) for label, encoded in streams.items()}, requirements)
    first = next(iter(manifests))
    dataset = TextDataset(
        row=manifests[first].positions + 1,
        vocabulary=manifests[first].vocabulary,
        **dataset_arguments(
            "texts",
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
    dataset.check_shapes(whole=True, tokens=(dataset.row,))
    return Loading(
        open_loader(dataset, placement, workers, drop_last),
        widen,
        samples=int(dataset.epoch_size),
        vocabulary=_vocabulary(streams[first].file(VOCABULARY), manifests[first]),
    )


class TextDataset(EncodedDataset):
    """Rows of tokens.

    Args:
        row: tokens per row, S + 1.
        vocabulary: number of different tokens, below which they must be; None: they are not compared.
        arguments: of `EncodedDataset`.
    """

    def __init__(self, *, row: int, vocabulary: int | None = None, **arguments: Any) -> None:
        self.row = row
        self.vocabulary = vocabulary
        super().__init__(columns={"tokens": "tokens"}, **arguments)

    def specs(self, samples: int) -> Specs:
        """See `EncodedDataset.specs`."""
        return {"tokens": ((samples, self.row), torch.int32)}

    def collate(self, samples: Sequence[StoredSample]) -> Batch:
        """See `EncodedDataset.collate`.

        Returns:
            `tokens` (B, S + 1) int32.

        Raises:
            DamagedError: a row has a token that the vocabulary does not have. A GPU would say nothing that names it.
        """
        batch = self.new_batch(samples)
        stored = torch.empty((len(samples), self.row), dtype=self.arrays["tokens"].dtype)  # uint16
        copy_rows(samples, {"tokens": stored})
        if self.vocabulary is not None and stored.numpy().max() >= self.vocabulary:
            row, position = np.argwhere(stored.numpy() >= self.vocabulary)[0]
            raise DamagedError(
                f"texts: {samples[row].texts[0]} has the token {stored[row, position].item()}, its vocabulary has "
                f"{self.vocabulary} tokens from 0; pack the texts again"
            )
        batch["tokens"].numpy()[:] = stored.numpy()
        return batch
