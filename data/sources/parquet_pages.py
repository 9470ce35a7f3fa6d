"""The headers of Parquet pages, compared with the file's metadata before anything is decompressed.

pyarrow takes memory for as many bytes as a page's header claims, up to 2 GiB, and for as many entries as the header of
a dictionary claims. The headers are Thrift structures in its compact protocol (parquet-format's `PageHeader`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

WINDOWS = (1 << 16, 1 << 24)  # bytes that are read for a header; the second is the most that pyarrow takes
DEEPEST = 8  # structures within structures
UNCOMPRESSED, COMPRESSED, DICTIONARY = 2, 3, 7  # numbers of fields of a PageHeader
VALUES = 1  # of a DictionaryPageHeader


def check_pages(file: Path, chunks: list[Any]) -> None:
    """Compare the headers of all pages of column chunks with the chunks' sizes in the file's metadata.

    Args:
        file: the Parquet file.
        chunks: pyarrow's `ColumnChunkMetaData`.

    Raises:
        ValueError: a page claims more bytes than its chunk, or a dictionary more entries than bytes.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        for chunk in chunks:
            try:
                _check_chunk(stream, chunk, size)
            except ValueError as error:
                raise ValueError(f"column {chunk.path_in_schema}: {error}") from None


def _check_chunk(stream: BinaryIO, chunk: Any, size: int) -> None:
    begin = chunk.data_page_offset
    if chunk.dictionary_page_offset:  # 0 is written by some for none
        begin = min(begin, chunk.dictionary_page_offset)
    end = begin + chunk.total_compressed_size
    if not 0 <= begin <= end <= size:
        raise ValueError(f"its pages are bytes {begin:,} to {end:,} of a file of {size:,}")
    while begin < end:
        header, length = _header(stream, begin)
        compressed, held = header.get(COMPRESSED, -1), header.get(UNCOMPRESSED, -1)
        # Some writers leave a header out of the compressed size of the chunk, so the file is the limit.
        if not 0 <= compressed <= size - begin - length or not 0 <= held <= chunk.total_uncompressed_size:
            raise ValueError(
                f"a page at byte {begin:,} claims {compressed:,} bytes, {held:,} uncompressed, of the "
                f"{chunk.total_uncompressed_size:,} that its column has uncompressed"
            )
        entries = header[DICTIONARY].get(VALUES, -1) if isinstance(header.get(DICTIONARY), dict) else 0
        if not 0 <= entries <= held:
            raise ValueError(f"a dictionary at byte {begin:,} claims {entries:,} entries in {held:,} bytes")
        begin += length + compressed


def _header(stream: BinaryIO, begin: int) -> tuple[dict[int, Any], int]:
    """A page's header and its length in bytes."""
    for window in WINDOWS:
        stream.seek(begin)
        data = stream.read(window)
        try:
            return _structure(data, 0, DEEPEST)
        except IndexError:
            continue  # it goes on beyond the window
    raise ValueError(f"no page at byte {begin:,}")


def _structure(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a structure by number, and where it ends. Only numbers and structures keep their values.

    Raises:
        IndexError: it goes on beyond the data.
        ValueError: it is not a structure.
    """
    if not depth:
        raise ValueError("structures within structures")
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step = data[at] & 15, data[at] >> 4
        number, at = (number + step, at + 1) if step else _integer(data, at + 1)
        fields[number], at = _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:  # a boolean, whose value is its type
            return kind == 1, at
        case 3:
            return data[at], at + 1
        case 4 | 5 | 6:
            return _integer(data, at)
        case 7:
            return None, at + 8
        case 8:
            length, at = _varint(data, at)
            return None, at + length
        case 12:
            return _structure(data, at, depth - 1)
    raise ValueError(f"type {kind}, which a page's header has not")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
