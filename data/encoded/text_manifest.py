"""The manifest of a set of packed texts: written beside its shards by `precompute/pack.py`, checked before training."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.system.files import read_object, write_text

NAME = "text.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TextManifest:
    """What a set of packed texts holds."""

    positions: int
    """Tokens that are predicted per row. A row has one more, which is the first of the next row of its shard."""
    vocabulary: int
    """Number of different tokens: the entries of the vocabulary, and the end of a text, which has the last number."""
    vocabulary_hash: str
    """sha256 of the vocabulary's file."""
    samples: int
    """Number of rows."""
    texts: int
    """Number of texts."""
    left_out: int
    """Tokens at the ends of shards that fill no row."""
    rejected: dict[str, int]
    """Number of rejected texts, by reason."""
    shards: int
    """Number of input shards, each of which has its own folder."""
    bytes: int
    """Size of the MDS files on disk."""
    request: dict[str, Any]
    """The part of the config that determines the set."""
    version: int = VERSION
    """Version of this format."""

    @classmethod
    def read(cls, path: Path) -> TextManifest:
        """Reads a manifest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is no manifest of this version.
        """
        try:
            values = read_object(path)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"no file {path}: no packed texts; make them with precompute/pack.py") from None
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); pack the texts again") from None
        fields = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != fields or values["version"] != VERSION:
            raise ValueError(f"{path}: not a manifest of version {VERSION}; pack the texts again")
        for name in ("positions", "vocabulary", "samples"):
            if type(values[name]) is not int or values[name] < 1:
                raise ValueError(f"{path}: {name} is {values[name]!r:.40}, expected a number above 0; pack them again")
        return cls(**values)

    def write(self, folder: Path) -> None:
        """Writes FOLDER/text.json, atomically."""
        write_text(folder / NAME, json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")

    def check(self, where: Path | str, *, positions: int, vocabulary: int) -> None:
        """Compares the set with what a model needs.

        Args:
            where: the manifest's path, for messages.
            positions: of the model.
            vocabulary: the model's number of tokens, which may be larger than the set's.

        Raises:
            ValueError: the model does not fit.
        """
        if self.positions != positions:
            raise ValueError(
                f"{where}: rows have {self.positions} positions, the model {positions}; give the model as many, or "
                "pack the texts again"
            )
        if self.vocabulary > vocabulary:
            raise ValueError(
                f"{where}: the texts have {self.vocabulary} tokens, the model {vocabulary}; give the model as many or "
                "more"
            )
