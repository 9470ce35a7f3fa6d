"""A vocabulary's file and the manifest beside it, as they were when they were read, and copies of both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data.system.disk_errors import about
from data.system.files import atomic_write, read_object

VOCABULARY = "vocabulary.json"  # the copy in a set of packed texts or an export
SUFFIX = ".manifest.json"


def manifest_path(vocabulary: Path) -> Path:
    """The path of a vocabulary's manifest: what the vocabulary was trained on, and the sha256 of its file."""
    return vocabulary.with_name(vocabulary.stem + SUFFIX)


def read_manifest(vocabulary: Path) -> dict[str, Any]:
    """Reads a vocabulary's manifest.

    Raises:
        ValueError: the manifest is damaged.
    """
    path = manifest_path(vocabulary)
    try:
        values = read_object(path)
    except ValueError:
        values = {}
    if "sha256" not in values:
        raise ValueError(f"{path}: damaged; delete it and train the vocabulary again")
    return values


@dataclass(frozen=True)
class VocabularyFile:
    """What was in a vocabulary's file when it was read. Another vocabulary may be in its place when a run that was
    trained with this one ends, and its export needs a copy.

    Attributes:
        path: of the file.
        data: its contents.
        manifest: the contents of its manifest; None: it has none.
        sha256: of `data`, in hexadecimal digits.
    """

    path: Path
    data: bytes = field(repr=False)
    manifest: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a vocabulary's file, and its manifest if it has one. Neither is checked.

        Raises:
            OSError: the file cannot be read.
        """
        path = Path(path)
        manifest = manifest_path(path)
        with about(path):
            return cls(path, path.read_bytes(), manifest.read_bytes() if manifest.is_file() else None)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def copy(self, folder: Path) -> Path:
        """Writes FOLDER/vocabulary.json and the manifest. Returns the copy's path."""
        copy = folder / VOCABULARY
        for target, data in ((manifest_path(copy), self.manifest), (copy, self.data)):  # who finds the copy finds both
            if data is not None:
                with atomic_write(target) as partial:
                    partial.write_bytes(data)
        return copy
