"""The headers of Parquet pages, compared with the file's metadata before anything is decompressed.

pyarrow takes memory for as many bytes as a page's header claims, up to 2 GiB, and for as many entries as the header of
a dictionary claims. The headers are parquet-format's `PageHeader`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from data.sources.parquet_footer import Chunk
from data.sources.thrift import structure

WINDOWS = (1 << 16, 1 << 24)  # bytes that are read for a header; the second is the most that pyarrow takes
UNCOMPRESSED, COMPRESSED, DICTIONARY = 2, 3, 7  # numbers of fields of a PageHeader
VALUES = 1  # of a DictionaryPageHeader


def check_pages(file: Path, chunks: Iterable[Chunk]) -> None:
    """Compare the headers of all pages of column chunks with the chunks' sizes in the file's metadata.

    Args:
        file: the Parquet file.
        chunks: of columns that are read.

    Raises:
        ValueError: a page claims more bytes than its chunk, or a dictionary more entries than bytes.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        for chunk in chunks:
            try:
                _check_chunk(stream, chunk, size)
            except ValueError as error:
                raise ValueError(f"column {chunk.path}: {error}") from None


def _check_chunk(stream: BinaryIO, chunk: Chunk, size: int) -> None:
    begin = chunk.data_page_offset
    if chunk.dictionary_page_offset:  # 0 is written by some for none
        begin = min(begin, chunk.dictionary_page_offset)
    end = begin + chunk.total_compressed_size
    if not 0 <= begin <= end <= size:
        raise ValueError(f"its pages are bytes {begin:,} to {end:,} of a file of {size:,}")
    while begin < end:
        header, length = _header(stream, begin)
        compressed, held = _number(header, COMPRESSED), _number(header, UNCOMPRESSED)
        # Some writers leave a header out of the compressed size of the chunk, so the file is the limit.
        if not 0 <= compressed <= size - begin - length or not 0 <= held <= chunk.total_uncompressed_size:
            raise ValueError(
                f"a page at byte {begin:,} claims {compressed:,} bytes, {held:,} uncompressed, of the "
                f"{chunk.total_uncompressed_size:,} that its column has uncompressed"
            )
        dictionary = header.get(DICTIONARY)
        entries = _number(dictionary, VALUES) if isinstance(dictionary, dict) else 0
        if not 0 <= entries <= held:
            raise ValueError(f"a dictionary at byte {begin:,} claims {entries:,} entries in {held:,} bytes")
        begin += length + compressed


def _number(header: dict[int, Any], field: int) -> int:
    """-1 where the field is missing, or where its value is something else."""
    value = header.get(field)
    return value if isinstance(value, int) else -1


def _header(stream: BinaryIO, begin: int) -> tuple[dict[int, Any], int]:
    """A page's header and its length in bytes."""
    for window in WINDOWS:
        stream.seek(begin)
        data = stream.read(window)
        try:
            return structure(data)
        except IndexError:
            continue  # it goes on beyond the window
    raise ValueError(f"no page at byte {begin:,}")
