"""The YAML keys of the job that packs texts. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from data.aliases import InputPath
from precompute.config import default_filter, filter_version, source_errors, storage_errors
from recipes.config.schema import ConfigError
from recipes.config.values import plain_values

if TYPE_CHECKING:
    from data.tokenizers.bpe import Vocabulary

MOST_TOKENS = 1 << 16  # tokens are stored as uint16


@dataclass(kw_only=True)
class PackConfig:
    """A packing job: it encodes texts, joins them, and writes rows of tokens of one length as folders of MDS shards."""

    out: str
    """Local folder of the result; each source gets a folder inside it, which has the source's label as its name."""
    sources: dict[str, Annotated[Any, "source"]]
    """Sources of text files or of captions, by label (train, val, ...). The images of captions are not read."""
    filter: Annotated[Any, "filter"] | None = None
    """Which texts are packed, as in the encode job; rejected.jsonl lists the rejected ones. null: all that can be
    read."""
    vocabulary: InputPath
    """File of the vocabulary that `precompute/vocabulary.py` wrote. The end-of-text token is added to it."""
    positions: int = 1024
    """Tokens that are predicted per row. A row has one token more, which is also the first token of the next row of its
    shard."""
    size_limit: str = "64mb"
    """Maximum size of an MDS file before compression, such as 64mb."""
    compression: str | None = None
    """Compression of the MDS files: zstd, gz, br, bz2 or snappy, optionally with a level, such as zstd:7."""
    hashes: list[str] = field(default_factory=lambda: ["xxh3_64"])
    """Checksums of the MDS files in the index, by which `validate_hash` finds damaged files in training."""

    def __post_init__(self) -> None:
        self.filter = self.filter or default_filter()
        self.out = os.path.expanduser(self.out)
        errors = []
        if not self.out:
            errors.append("out: empty; give a folder")
        if "://" in self.out:
            errors.append(f"out: {self.out} is remote; pack into a local folder and upload that")
        errors += source_errors(self.sources, "{name: texts, files: [...]}")
        if self.positions < 1:
            errors.append(f"positions: {self.positions}; give 1 or more")
        errors += storage_errors(self.size_limit, self.compression, self.hashes)
        if errors:
            raise ConfigError(errors)

    def read_vocabulary(self) -> Vocabulary:
        """The vocabulary, read from its file.

        Raises:
            ValueError: the file is no vocabulary, is not the one of its manifest, or has too many entries.
        """
        from data.tokenizers.bpe import Vocabulary  # not above: the keys do not need the tokenizers library

        vocabulary = Vocabulary.read(self.vocabulary)
        if vocabulary.size >= MOST_TOKENS:
            raise ValueError(
                f"vocabulary: {self.vocabulary} has {vocabulary.size:,} entries; give one with {MOST_TOKENS - 1:,} or "
                "fewer, as tokens are stored in 16 bits"
            )
        return vocabulary

    def request(self) -> dict[str, Any]:
        """Everything that determines the rows, with the digest of the vocabulary."""
        digest = hashlib.sha256(Path(self.vocabulary).read_bytes()).hexdigest()
        own = {"filter": plain_values(self.filter), **filter_version(self.filter)}
        return own | {"positions": self.positions, "vocabulary": digest}
