"""A folder of images, with captions in .txt files of the same name or in one table."""

import csv
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from data.aliases import InputPath
from data.sources.base import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    ReadOnce,
    Rejected,
    Sample,
    assemble,
    files_below,
    shard_id,
)

_NAME_COLUMNS = ("file_name", "file")
_CAPTION_COLUMNS = ("text", "caption")
_SUFFIXES = f".{', .'.join(IMAGE_SUFFIXES)}"


class FolderSource:
    """Images of a folder and all its subfolders, in the order of their names.

    Keys are paths relative to the folder without the suffix. Images that differ only in the suffix keep it.
    """

    def __init__(self, *, path: InputPath, captions: str = "txt", shard_size: int = 1000) -> None:
        """
        Args:
            path: the folder.
            captions: "txt" for a .txt file beside each image, or the path of one .jsonl or .csv (inside the
                folder or from the current one) with columns file_name or file, and text or caption.
            shard_size: number of images per shard.

        Raises:
            FileNotFoundError: no such folder, no image in it, or no such table.
            ValueError: no image has its .txt or a row of the table; a table of another kind, without the columns, or
                not UTF-8; `shard_size` below 1.
        """
        self.root = Path(path)
        if not self.root.is_dir():
            raise FileNotFoundError(f"source.path: no folder {path}")
        if shard_size < 1:
            raise ValueError(f"source.shard_size is {shard_size}: give 1 or more images")
        names = list(files_below(self.root))
        parts = [(name, *_divided(name)) for name in names]
        self.images = _keys([(name, stem) for name, stem, suffix in parts if suffix in IMAGE_SUFFIXES])
        self.texts: dict[str, str] = {}  # name without suffix -> .txt, where each image has its own
        self.table: dict[str, str] | None = None  # name in the folder -> caption, where one table has them
        repeated: list[str] = []
        if captions == "txt":
            stems = {stem for _, stem, suffix in parts if suffix in IMAGE_SUFFIXES}
            texts = [(stem, name) for name, stem, suffix in parts if suffix == "txt"]
            self.texts = dict(texts)
            orphans = [stem for stem, _ in texts if stem not in stems]
            if stems and len(orphans) == len(texts):
                tables = [name for name, _, suffix in parts if suffix in ("jsonl", "csv")]
                found = f", such as {tables[0]}, which is there" if tables else ""
                raise ValueError(
                    f"source.captions: no image in {path} has a .txt file of its name beside it; write these, or give "
                    f"the name of a .jsonl or .csv file{found}"
                )
        else:
            self.table, repeated = _read_table(self.root, captions)
            orphans = [name for name in self.table if name not in self.images]
            if self.images and len(orphans) == len(self.table):
                rows = f"its first row names {orphans[0]}" if orphans else "it has no row"
                raise ValueError(
                    f"source.captions: {captions} names no image in {path}: {rows}, and the folder holds "
                    f"{next(iter(self.images))}; give names relative to the folder, with their suffix"
                )
        if not self.images:
            raise FileNotFoundError(f"source.path: no image ({_SUFFIXES}) in {path}")
        # Captions without an image and repeated rows are entries too, so that they are rejected.
        entries: list[tuple[str, str]] = [("image", name) for name in self.images]
        entries += [("orphan", name) for name in orphans] + [("repeated", name) for name in repeated]
        entries.sort(key=lambda entry: (entry[1], entry[0]))
        self.entries: dict[str, list[tuple[str, str]]] = {}
        for number, start in enumerate(range(0, len(entries), shard_size)):
            part = entries[start : start + shard_size]
            names = [name for _, name in part]
            captions = [] if self.table is None else [json.dumps([self.table.get(name) for name in names])]
            self.entries[shard_id(f"{number:05d}", *names, *captions)] = part

    def shards(self) -> list[str]:
        """One id for each `shard_size` images; it changes when the names in the shard or their captions in a table do.
        What .txt files hold does not change it: they are read with the images."""
        return list(self.entries)

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one shard, in the order of names (see `base.Source.read`).

        Raises:
            OSError: a folder cannot be listed any more, or is empty.
        """
        if shard not in self.entries:
            raise ValueError(f"no shard {shard!r} in this source: it has {len(self.entries)}")
        once = ReadOnce()
        for kind, name in self.entries[shard]:
            if kind == "orphan":
                yield once(Rejected(name, "missing_image", f"a caption without an image ({_SUFFIXES}) of its name"))
            elif kind == "repeated":
                yield Rejected(name, "duplicate_key", "a second row of the captions table")
            else:
                yield once(self._sample(name))

    def _sample(self, name: str) -> Sample | Rejected:
        key, path = self.images[name], self.root / name
        try:
            return self._read_image(key, name, path)
        # A broken link, or a file that was removed since the folder was listed.
        except (FileNotFoundError, PermissionError) as error:
            _require_files(path.parent)
            return Rejected(key, "missing_image", f"{name}: {error.strerror}")

    def _read_image(self, key: str, name: str, path: Path) -> Sample | Rejected:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a named pipe would wait for ever
            return Rejected(key, "missing_image", f"{name}: a pipe, socket or device, not a file")
        if status.st_size > MAX_FILE_BYTES:
            return Rejected(key, "too_large_file", f"{status.st_size} bytes")
        if self.table is not None:
            if name not in self.table:
                return Rejected(key, "missing_caption", "no row of the captions table")
            return assemble(key, path.read_bytes(), self.table[name])
        stem, _ = _divided(name)
        text = self.root / self.texts.get(stem, f"{stem}.txt")
        if not text.is_file():
            _require_files(text.parent)
            return Rejected(key, "missing_caption", f"no file {text.name}")
        return assemble(key, path.read_bytes(), text.read_bytes())


def _require_files(folder: Path) -> None:
    """A file that is missing is one sample less. But all of them are missing where a network folder is not mounted any
    more, or the ticket for it has expired.

    Raises:
        OSError: the folder cannot be listed, or nothing is in it.
    """
    with os.scandir(folder) as found:
        if next(found, None) is None:
            raise FileNotFoundError(errno.ENOENT, "Nothing is in it any more; is it still mounted?", str(folder))


def _divided(name: str) -> tuple[str, str]:
    """A name without its suffix, and the suffix in lower case: as pathlib, which takes ten times as long."""
    stem, _, suffix = name.rpartition(".")
    if not suffix or "/" in suffix or stem[-1:] in ("", "/"):
        return name, ""
    return stem, suffix.lower()


def _keys(images: list[tuple[str, str]]) -> dict[str, str]:
    """Name -> key, of (name, name without its suffix): the latter where it is unique."""
    counts = Counter(stem for _, stem in images)
    return {name: stem if counts[stem] == 1 else name for name, stem in images}


def _read_table(root: Path, captions: str) -> tuple[dict[str, str], list[str]]:
    """Reads a .jsonl or .csv: file name -> caption, and the names of repeated rows."""
    path = next((path for path in (root / captions, Path(os.path.expanduser(captions))) if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f'source.captions: no file {captions}: give "txt", or a .jsonl or .csv file')
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f'source.captions: {captions} is not read: give "txt", or a .jsonl or .csv file')
    table: dict[str, str] = {}
    repeated: list[str] = []
    try:
        for line, row in readers[path.suffix.lower()](path):
            name = _take(row, _NAME_COLUMNS, path, line)
            caption = _take(row, _CAPTION_COLUMNS, path, line)
            # "./a.png" is "a.png". A row without a name is listed by its line.
            name = PurePosixPath(name).as_posix() if name.strip() else f"{path.name}:{line}"
            if name in table:
                repeated.append(name)
            else:
                table[name] = caption
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    return table, repeated


def _take(row: dict[str, Any], columns: tuple[str, str], path: Path, line: int) -> str:
    """The first of two columns of a row. A missing name or caption becomes an empty one, which is rejected later."""
    for column in columns:
        if column in row:
            value = row[column]
            if value is None:
                return ""
            if not isinstance(value, str):
                raise ValueError(f"{path}, line {line}: {column} is a {type(value).__name__}: give a string")
            return value
    raise ValueError(f"{path}, line {line}: no column {columns[0]} or {columns[1]} (it has: {list(row)!r:.200})")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {line}: give one JSON object per line")
            yield line, row


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        # Otherwise a quote that is not closed takes the rows behind it into the caption.
        reader = csv.DictReader(file, strict=True)
        before = 0  # number of lines of the rows so far
        try:
            before = reader.line_num if reader.fieldnames else 0
            first = (reader.fieldnames or [""])[0]
            if other := next((mark for mark in (";", "\t") if mark in first), None):  # of some spreadsheet programs
                raise ValueError(f"{path}, line 1: the cells are separated by {other!r}: separate them by commas")
            columns = Counter(reader.fieldnames)
            if twice := [name for name in _NAME_COLUMNS + _CAPTION_COLUMNS if columns[name] > 1]:
                raise ValueError(f"{path}, line 1: several columns are named {twice[0]}: rename all but one")
            for row in reader:
                if None in row:
                    raise ValueError(f"{path}, line {reader.line_num}: more cells than columns: quote the commas")
                before = reader.line_num
                yield before, row
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {before + 1}: {error}: close the quote that a cell of this row begins with, right "
                "before the comma or the end of the line, and double those within the cell, or give the table as a "
                ".jsonl file, where captions may have any length"
            ) from None
