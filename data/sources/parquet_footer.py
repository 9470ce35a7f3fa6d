"""Sizes and places of the row groups of a Parquet file, from the metadata at its end (parquet-format's `FileMetaData`).

pyarrow has them, too, but ends the process where the metadata of a column is damaged: it does not catch what its C++
library raises there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sources.thrift import structure

END = 8  # bytes behind the metadata: its length, and the mark
GROUPS, COLUMNS, ROWS, METADATA = 4, 1, 3, 3  # numbers of fields: of FileMetaData, RowGroup (two) and ColumnChunk
PATH, UNCOMPRESSED, COMPRESSED, DATA, DICTIONARY = 3, 6, 7, 9, 11  # of ColumnMetaData


@dataclass(frozen=True)
class Chunk:
    """The part of a column that a row group has.

    Attributes:
        path: names of the column and of the fields within it, joined by dots.
        total_uncompressed_size: bytes of its pages.
        total_compressed_size: the same in the file.
        data_page_offset: byte of the file at which its first page of data begins.
        dictionary_page_offset: the same of its dictionary, or 0.
    """

    path: str
    total_uncompressed_size: int
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int


@dataclass(frozen=True)
class RowGroup:
    """A row group: its number of rows, and its part of each column."""

    rows: int
    chunks: list[Chunk]

    def of(self, columns: list[str]) -> list[Chunk]:
        """The chunks of some columns, with all fields of those that are structures."""
        return [chunk for chunk in self.chunks if f"{chunk.path}.".startswith(tuple(f"{name}." for name in columns))]


def row_groups(file: Path) -> list[RowGroup]:
    """All row groups of a Parquet file that pyarrow has opened.

    Raises:
        ValueError: its metadata is damaged.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        stream.seek(max(0, size - END))
        length = int.from_bytes(stream.read(END)[:4], "little")
        if length > size - END:
            raise ValueError(f"{file}: the metadata claims {length:,} of the file's {size:,} bytes; write it again")
        stream.seek(size - END - length)
        data = stream.read(length)
    try:
        fields, _ = structure(data)
        return [_row_group(group) for group in fields[GROUPS]]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):  # fields that are missing, or of another type
        raise ValueError(f"{file}: the metadata at its end is damaged; write it again") from None


def _row_group(fields: dict[int, Any]) -> RowGroup:
    return RowGroup(int(fields[ROWS]), [_chunk(column[METADATA]) for column in fields[COLUMNS]])


def _chunk(fields: dict[int, Any]) -> Chunk:
    path = ".".join(name.decode("utf-8") for name in fields[PATH])
    numbers = [int(fields[number]) for number in (UNCOMPRESSED, COMPRESSED, DATA)]
    return Chunk(path, *numbers, int(fields.get(DICTIONARY, 0)))
