"""Files and folders that are either whole or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which is renamed to it when the block ends without an error.

    The folder is created where it is missing. After an error nothing is left: `path` is as it was before. Processes of
    several machines may write the same file at the same time; the last one wins.

    Example::

        with atomic_write(folder / "grid.png") as partial:
            picture.save(partial, format="PNG")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())  # on disk before it has its name: no empty file after a power failure
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any, indent: int | None = None) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new temporary folder beside `path`, which replaces it when the block ends without an error.

    The old folder, where there is one, is removed only after the new one has its name. What processes that were killed
    have left beside it is removed first: only one process at a time writes a folder.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    aside = path.with_name(f".{path.name}.old.{os.getpid()}")
    for left in path.parent.glob(f".{path.name}.*"):
        if re.fullmatch(r"(old\.)?\d+", left.name.removeprefix(f".{path.name}.")):
            shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            path.rename(aside)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def point_to(link: Path, path: Path) -> None:
    """Make a link to a file or folder beside it, in place of the one that it was."""
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(path.name)
    partial.replace(link)
