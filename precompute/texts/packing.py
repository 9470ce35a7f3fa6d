"""One rank's part of a packing job: texts to tokens, tokens to rows of one length, rows to MDS shards.

The texts of an input shard are joined, each followed by a token of its own that ends it, and cut into rows that overlap
by one token: each token but the first of a shard is predicted once. What fills no row at the end of a shard is left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.encoded.text_manifest import TextManifest
from data.sources.base import Rejected, Source
from data.sources.filters import judged
from data.system.errors import together
from data.system.files import write_text
from data.system.locks import HeldByAnother, held
from data.system.log import every_rank, log
from data.system.ranks import Rank
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.vocabulary_files import VOCABULARY, VocabularyFile
from precompute.config import source_options
from precompute.output.claims import shards_to_do
from precompute.output.folder_gone import FolderGone
from precompute.output.output_set import CONFIG, MERGING, NothingEncoded, OutputSet
from precompute.output.problems import Problem
from precompute.output.shard_folder import ShardFolder, Storage
from precompute.output.totals import counts_text, rejected
from precompute.output.unreadable import Unreadable, could_not_be_read, not_done, read_samples
from precompute.texts.pack_config import PackConfig
from recipes.config.build import build
from recipes.config.recipe import to_yaml

CHARACTERS = 1 << 22  # of the texts that are encoded at once


class Packed:
    """The rows of a stream of texts.

    Args:
        vocabulary: encodes texts; its size is the number of the token that ends one.
        positions: S; rows have S + 1 tokens.

    Attributes:
        texts: number of texts so far.
        left: tokens that fill no row yet.
    """

    def __init__(self, vocabulary: Vocabulary, positions: int) -> None:
        self.vocabulary = vocabulary
        self.positions = positions
        self.texts = 0
        self.left = np.empty(0, np.uint16)

    def rows(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """uint16 (S + 1,) each, as soon as they are full."""
        for group in _groups(texts):
            self.texts += len(group)
            end = np.asarray([self.vocabulary.size], np.uint16)
            parts = [self.left]
            for ids in self.vocabulary.encode_all(group):
                parts += [np.asarray(ids, np.uint16), end]
            tokens = np.concatenate(parts)
            full = max(0, len(tokens) - 1) // self.positions
            for start in range(0, full * self.positions, self.positions):
                yield tokens[start : start + self.positions + 1]
            self.left = tokens[full * self.positions :]


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts that have `CHARACTERS` in all, or a bit more."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def pack(config: PackConfig, sources: dict[str, Source], sets: dict[str, OutputSet], rank: Rank) -> None:
    """Packs this rank's shards that are not done yet, and then those that no other has begun. Merges every set of which
    all shards are done.

    Raises:
        ValueError: a vocabulary with too many entries, a folder that holds rows made with other options, or input
            shards that could not be read, and no other is left; or the texts of a source fill no row. The other sets
            are complete all the same.
    """
    vocabulary = config.read_vocabulary()
    file = VocabularyFile.read(config.vocabulary)
    options = {label: config.request() | source_options(config.sources[label]) for label in sets}
    together(partial(output.check, options[label]) for label, output in sets.items())
    for label, output in sets.items():
        output.claim(options[label])
        write_text(output.out / CONFIG, to_yaml(config))
        copy = output.out / VOCABULARY
        if not copy.is_file() or VocabularyFile.read(copy).sha256 != file.sha256:  # `claim` has compared the set's
            file.copy(output.out)
    for label, shard, keep in shards_to_do(sets, rank):
        try:
            _pack_shard(config, sources[label], sets[label], shard, rank, vocabulary, options[label], keep)
        except Unreadable as error:
            every_rank.warning(f"pack: {shard} could not be read: {error}")
            sets[label].note_unreadable(shard, error.problem)
    unreadable: dict[str, Problem] = {}
    others = False  # whether shards of any set are left to them
    empty: list[str] = []
    for label, output in sets.items():
        missing, broken = not_done(output)
        unreadable |= broken
        if left := missing - len(broken):
            others = True
            every_rank.info(f"{output.out}: {left} of {len(output.shards)} shards are left to other ranks")
        if missing:
            continue
        try:
            with held(Path(config.out, MERGING.format(label)), "{holder}"):  # of ranks that end together, one is enough
                _merge(config, output, vocabulary, options[label])
        except HeldByAnother as error:
            every_rank.info(f"{output.out}: all shards are done; {error} merges them")
        except NothingEncoded as error:
            empty.append(str(error))
    if unreadable and not others:
        raise could_not_be_read(unreadable, ", or take them out of the source")
    if empty and not others:
        raise ValueError("; ".join(empty))


def _pack_shard(
    config: PackConfig,
    source: Source,
    output: OutputSet,
    shard: str,
    rank: Rank,
    vocabulary: Vocabulary,
    options: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Writes the rows of one input shard into a folder of their own. `keep` is called for each text.

    Raises:
        Unreadable: the reading of the shard breaks off.
    """
    judge = build(config.filter)
    columns = {"key": "str", "tokens": f"ndarray:uint16:{config.positions + 1}"}
    storage = Storage(config.size_limit, config.compression, tuple(config.hashes))
    folder = ShardFolder(output.partial(shard, rank.rank), shard, columns, storage, options)

    def texts() -> Iterator[str]:
        for sample in read_samples(source, shard):
            keep()
            text = sample if isinstance(sample, Rejected) else judged(judge, sample)
            if isinstance(text, Rejected):
                folder.reject(text)
            else:
                yield text

    packed = Packed(vocabulary, config.positions)
    try:
        for row in packed.rows(texts()):
            folder.write({"key": f"{shard}/{folder.rows}", "tokens": row})
        left = max(0, len(packed.left) - 1) if folder.rows else len(packed.left)
        folder.close(texts=packed.texts, left_out=left)
    except FolderGone:  # another rank took this one for lost, and has finished the shard, or `publish` says so
        folder.abandon()
    except BaseException:
        folder.abandon()
        raise
    output.publish(shard, rank.rank)
    log.info(f"pack: {shard}: {packed.texts:,} texts, {folder.rows:,} rows")


def _merge(config: PackConfig, output: OutputSet, vocabulary: Vocabulary, options: dict[str, Any]) -> None:
    """Writes the index, the rejected texts and the manifest of all shards, the manifest last."""
    markers = output.join(options)

    def total(name: str) -> int:
        return sum(marker[name] for marker in markers)

    manifest = TextManifest(
        positions=config.positions,
        vocabulary=vocabulary.size + 1,
        vocabulary_hash=options["vocabulary"],
        samples=total("samples"),
        texts=total("texts"),
        left_out=total("left_out"),
        rejected=rejected(markers),
        shards=len(markers),
        bytes=total("bytes"),
        request=options,
    )
    manifest.write(output.out)
    output.forget_unreadable(output.shards)  # of ranks that could not read what others could
    output.remove_stale()
    every_rank.info(
        f"wrote {output.out}: {manifest.texts:,} texts as {manifest.samples:,} rows of {manifest.positions} + 1 tokens "
        f"({manifest.left_out:,} tokens left out), {manifest.bytes / 1e6:,.1f} MB; rejected: "
        f"{counts_text(manifest.rejected.items())}"
    )
