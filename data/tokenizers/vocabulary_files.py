"""The manifest beside a vocabulary's file, and copies of both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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


def copy_vocabulary(vocabulary: Path, folder: Path) -> Path:
    """Copies a vocabulary, and its manifest if it has one, to FOLDER/vocabulary.json. Returns the copy's path."""
    copy = folder / VOCABULARY
    files = {manifest_path(vocabulary): manifest_path(copy), vocabulary: copy}  # whoever finds the copy finds both
    for file, target in files.items():
        if file == vocabulary or file.is_file():
            with atomic_write(target) as partial:
                shutil.copyfile(file, partial)
    return copy
