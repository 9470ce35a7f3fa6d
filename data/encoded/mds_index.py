"""The index of a folder of MDS shards, read without trust: sizes and names are checked before anything is opened.

A large set has hundreds of thousands of files, and each process that reads it has their entries in memory. Nearly all
of an entry says what the columns are, which is the same for all files: entries have one list of it together.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

from data.system.files import read_object

INDEX = "index.json"
Shard = dict[str, Any]  # one entry of the index
# Names of the hashes that a shard may have.
HASHES = {"xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"} | {
    name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")
}
COMPRESSIONS = {"br", "bz2", "gz", "snappy", "zstd"}  # a level may follow, such as zstd:7
_LISTS = ("column_names", "column_encodings", "column_sizes", "hashes")


def read_index(folder: str | Path) -> list[Shard]:
    """Reads FOLDER/index.json and checks each entry.

    Entries with the same columns have the same lists of them: change none in place.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no index of MDS shards of version 2; an entry lacks a field, holds a value of another type,
            names a file outside of the folder or one of an earlier entry, or more samples than its file has room for.
    """
    path = Path(folder, INDEX)
    try:
        values = read_object(path, _Sharing().share)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no file {path}: name a folder of MDS shards") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); copy the file again") from None
    entries = values.get("shards")
    if values.get("version") != 2 or not isinstance(entries, list):
        raise ValueError(f"{path}: not the index of MDS shards, it has no `version` 2 or no list `shards`")
    before, named = None, set()
    for number, entry in enumerate(entries):
        try:
            check_entry(entry, before)
            name = entry["raw_data"]["basename"]
            if name in named:  # its samples would be trained on twice as often as all others
                raise ValueError(f"names {name!r:.80}, as an earlier shard does")
        except ValueError as error:
            raise ValueError(f"{path}: shard {number}: {error}") from None
        before = entry
        named.add(name)
    return entries


class _Sharing:
    """Gives entries the lists of the entry before, where theirs are equal, while the index is read."""

    def __init__(self) -> None:
        self._before: Shard = {}

    def share(self, values: dict[str, Any]) -> dict[str, Any]:
        """The JSON object itself, which may be any in the file."""
        if "column_names" in values:
            for name in _LISTS:
                if name in values and name in self._before and values[name] == self._before[name]:
                    values[name] = self._before[name]
            self._before = values
        return values


def check_entry(entry: Any, before: Shard | None = None) -> None:
    """Raises a ValueError unless an entry is right. Of the one before that is known."""
    if not isinstance(entry, dict) or entry.get("format") != "mds" or entry.get("version") != 2:
        shown = {name: entry.get(name) for name in ("format", "version")} if isinstance(entry, dict) else entry
        raise ValueError(f"is {shown!r:.80}; give MDS shards of version 2")
    if before is None or not all(entry.get(name) is before[name] for name in _LISTS):
        _check_columns(entry)
    if not (entry.get("compression") is None or isinstance(entry["compression"], str)):
        raise ValueError(f"compression is {entry['compression']!r:.80}; expected a name or null")
    if not _is_count(entry.get("samples")):
        raise ValueError(f"samples is {entry.get('samples')!r:.80}; expected a number")
    _check_file("raw_data", entry.get("raw_data"))
    if entry.get("zip_data") is not None:
        _check_file("zip_data", entry["zip_data"])
        if (entry.get("compression") or "").split(":")[0] not in COMPRESSIONS:
            known = ", ".join(sorted(COMPRESSIONS))
            raise ValueError(f"compression is {entry.get('compression')!r:.80}, which is not read; give one of {known}")
    if 4 * (entry["samples"] + 1) > entry["raw_data"]["bytes"]:
        raise ValueError(f"{entry['samples']} samples do not fit into {entry['raw_data']['bytes']} bytes")


def _check_columns(entry: Shard) -> None:
    columns = [entry.get(name) for name in ("column_names", "column_encodings", "column_sizes")]
    if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
        raise ValueError("column_names, column_encodings and column_sizes must be lists of one length")
    names, encodings, sizes = columns
    if not all(isinstance(text, str) for text in (*names, *encodings)) or len(set(names)) != len(names):
        raise ValueError("column_names and column_encodings must be texts, each name once")
    if not all(size is None or _is_count(size) for size in sizes):
        raise ValueError(f"column_sizes is {sizes!r:.80}; expected numbers or null")
    if not isinstance(entry.get("hashes"), list) or not all(isinstance(name, str) for name in entry["hashes"]):
        raise ValueError("hashes must be a list of names")


def _check_file(name: str, file: Any) -> None:
    if not isinstance(file, dict) or not isinstance(file.get("basename"), str) or not _is_count(file.get("bytes")):
        raise ValueError(f"{name} is {file!r:.80}; expected basename and bytes")
    parts = PurePosixPath(file["basename"]).parts
    if not parts or PurePosixPath(file["basename"]).is_absolute() or ".." in parts or "\0" in file["basename"]:
        raise ValueError(f"{name} names {file['basename']!r:.80}, which leaves the folder")
    hashes = file.get("hashes")
    if not isinstance(hashes, dict) or not all(isinstance(text, str) for text in hashes.values()):
        raise ValueError(f"{name} has no hashes by name")


def _is_count(value: Any) -> bool:
    # Offsets in a file have 32 bits. Libraries would raise other errors for larger numbers, or take memory for them.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
