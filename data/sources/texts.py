"""Text files without images, for vocabularies and packed texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from data.sources.base import MAX_FILE_BYTES, ReadOnce, Rejected, Sample, assemble, files_matching, shard_id


class TextSource:
    """Text files: a .jsonl has one text per line, any other file is one text. Jobs that need images reject them all.

    A shard consists of consecutive files, in the order of their names.
    """

    def __init__(
        self, *, files: list[str], exclude: list[str] | None = None, column: str = "text", shard_mb: int = 64
    ) -> None:
        """
        Args:
            files: paths, in which * stands for any characters but /, and ** for any folders. A file that
                several names or links lead to is read once.
            exclude: paths of files that are left out, written in the same way; null: none.
            column: key of the text in a line of a .jsonl.
            shard_mb: least size of a shard in megabytes. Files are joined to reach it, but never divided.

        Raises:
            FileNotFoundError: a pattern of `files` or `exclude` that fits no file.
            ValueError: no pattern, `shard_mb` below 1, or files that are all excluded.
        """
        if shard_mb < 1:
            raise ValueError(f"source.shard_mb is {shard_mb}: give 1 or more megabytes")
        if not files:
            raise ValueError("source.files: empty; give at least one path, such as texts/*.jsonl")
        self.column = column
        found: dict[str, str] = {}
        for pattern in files:
            for path, name in _files("files", pattern).items():
                found.setdefault(path, name)
        for pattern in exclude or []:
            for path in _files("exclude", pattern):
                found.pop(path, None)
        names = sorted(found.values())
        if not names:
            raise ValueError("source.files: there are files, and exclude leaves out all of them")
        self.parts: dict[str, list[str]] = {}
        part: list[str] = []
        identity: list[object] = []
        size = 0
        for name in names:
            length = Path(name).stat().st_size
            part.append(name)
            identity += [name, length]
            size += length
            if size >= shard_mb << 20 or name == names[-1]:
                self.parts[shard_id(f"{len(self.parts):05d}", *identity)] = part
                part, identity, size = [], [], 0

    def shards(self) -> list[str]:
        """One id per group of files; it changes when a name or a size does."""
        return list(self.parts)

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Texts of one shard as captions of empty images (see `base.Source.read`)."""
        if shard not in self.parts:
            raise ValueError(f"no shard {shard!r} in this source: it has {len(self.parts)}")
        once = ReadOnce()
        for name in self.parts[shard]:
            texts = self._lines(Path(name)) if name.endswith(".jsonl") else self._whole(Path(name))
            yield from map(once, texts)

    def _whole(self, path: Path) -> Iterator[Sample | Rejected]:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            yield Rejected(str(path), "too_large_file", f"{size} bytes; write one text per line of a .jsonl")
        else:
            yield assemble(str(path), b"", path.read_bytes())

    def _lines(self, path: Path) -> Iterator[Sample | Rejected]:
        with open(path, "rb") as file:
            for number in count(1):
                line = file.readline(MAX_FILE_BYTES + 1)
                if not line:
                    break
                if len(line) > MAX_FILE_BYTES:  # such as a file that is a single array
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_FILE_BYTES)
                    yield Rejected(f"{path}:{number}", "too_large_file", f"a line of over {MAX_FILE_BYTES} bytes")
                elif line.strip():
                    yield self._line(f"{path}:{number}", line)

    def _line(self, key: str, line: bytes) -> Sample | Rejected:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Rejected(key, "broken_metadata", str(error))
        text = row.get(self.column) if isinstance(row, dict) else None
        return assemble(key, b"", text if isinstance(text, str) else None)


def _files(key: str, pattern: str) -> dict[str, str]:
    """The names of the files that fit a pattern of the argument `key`, by their paths without links."""
    pattern = os.path.expanduser(pattern)
    # A file's own name comes first: it may contain what stands for other characters.
    names = [pattern] if Path(pattern).is_file() else files_matching(pattern)
    # By the files themselves: ** follows links, and a link to a folder above itself gives each file dozens of names.
    found: dict[str, str] = {}
    for name in sorted((Path(name).as_posix() for name in names), key=lambda name: (name.count("/"), name)):
        if Path(name).is_file():  # unlike os.path.isfile, which says no of a file that the disk does not give
            found.setdefault(os.path.realpath(name), name)
    if not found:
        raise FileNotFoundError(f"source.{key}: no file {pattern}")
    return found
