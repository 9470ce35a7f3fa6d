"""What one MDS file of an encoded set holds, as `precompute/verify.py` compares and counts it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming.base.format import Reader, reader_from_json
from streaming.base.hashing import get_hash

from data.encoded.column_reader import ArrayColumn, ColumnReader
from data.encoded.manifest import Manifest
from data.encoded.mds_index import HASHES, Shard
from data.sources.mds import locate
from data.system.log import log

CHUNK = 64  # samples that are looked at together
FINITE, LARGEST = 0x7C00, 0x7BFF  # of the bits of fp16 without the sign: all below are finite; the largest of these
CODES = 1 << 16  # of uint16
TEXTS = ("key", "caption")  # text columns of encoded images
FAULTS = 20  # lines that are printed


@dataclass
class ColumnFigures:
    """Figures of an array column.

    Attributes:
        nonfinite: number of values that are NaN or infinite.
        saturated: number of values at the largest fp16, and of tokens of codes that the codebook does not have.
        largest: the largest finite magnitude.
        count: of latents, the number of values per channel.
        sums, squares: of latents, the sums of the finite values and of their squares per channel; empty before any.
        seen: of tokens, the codes that there are.
    """

    nonfinite: int = 0
    saturated: int = 0
    largest: float = 0.0
    count: int = 0
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def add(self, other: ColumnFigures) -> None:
        """Adds the figures of other values."""
        self.nonfinite += other.nonfinite
        self.saturated += other.saturated
        self.largest = max(self.largest, other.largest)
        self.count += other.count
        self.sums = list(map(sum, zip_longest(self.sums, other.sums, fillvalue=0.0)))
        self.squares = list(map(sum, zip_longest(self.squares, other.squares, fillvalue=0.0)))
        self.seen |= other.seen


@dataclass
class FileFigures:
    """Figures of one or more MDS files.

    Attributes:
        samples, hashes: numbers of samples and hashes that were looked at.
        faults: one line each.
        columns: by the name of the column.
    """

    samples: int = 0
    hashes: int = 0
    faults: list[str] = field(default_factory=list)
    columns: dict[str, ColumnFigures] = field(default_factory=dict)

    def add(self, other: FileFigures) -> None:
        """Adds the figures of the files that come next."""
        self.samples += other.samples
        self.hashes += other.hashes
        self.faults += other.faults
        for name, column in other.columns.items():
            self.columns.setdefault(name, ColumnFigures()).add(column)


@dataclass(frozen=True)
class Column:
    """An array column.

    Attributes:
        shape: of a sample's array.
        dtype: of the values.
        counted: whether there are figures of them: of fp16 and tokens, not of the boxes of crops.
        codes: size of the codebook of tokens; None: they are no tokens.
        is_latent: whether there are statistics of it in the manifest.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    counted: bool
    codes: int | None
    is_latent: bool

    def figures(self, values: np.ndarray) -> ColumnFigures:
        """The figures of (B, *shape)."""
        found = ColumnFigures()
        if self.codes is not None:
            found.saturated = int((values >= self.codes).sum())
            there = np.zeros(CODES, bool)
            there[values.ravel()] = True
            found.seen = set(np.flatnonzero(there).tolist())
            return found
        # The bits without the sign are in the order of the magnitudes: no number needs to be converted, and one pass
        # finds out that there is nothing to count.
        bits = np.bitwise_and(values.view(np.uint16), 0x7FFF)
        largest = int(bits.max(initial=0))
        if largest >= LARGEST:
            found.nonfinite = int((bits >= FINITE).sum())
            found.saturated = int((bits == LARGEST).sum())
            largest = int(bits.max(initial=0, where=bits < FINITE))
        found.largest = float(np.uint16(largest).view(np.float16))
        if self.is_latent:
            exact = values.astype(np.float64)
            if found.nonfinite:
                exact[bits >= FINITE] = 0
            found.count = len(values) * prod(self.shape[1:])
            found.sums = exact.sum((0, 2, 3)).tolist()
            found.squares = np.square(exact, out=exact).sum((0, 2, 3)).tolist()
        return found


def array_columns(manifest: Manifest) -> dict[str, Column]:
    """The array columns of a set by name."""
    columns = {}
    for name, encoding in manifest.columns.items():
        kind, _, form = encoding.partition(":")
        if kind == "ndarray":
            dtype, sizes = form.split(":")
            shape = tuple(map(int, sizes.split(",")))
            codes = manifest.image_encoder["codes"] if name.startswith("tokens_") else None
            counted = codes is not None or dtype == "float16"
            columns[name] = Column(shape, np.dtype(dtype), counted, codes, name.startswith(("mean_", "std_")))
    return columns


def file_figures(
    folder: Path, entry: Shard, columns: Mapping[str, Column], texts: Sequence[str] = TEXTS
) -> FileFigures:
    """Reads an MDS file once, compares it with the index, and counts its values.

    Args:
        folder: of the set.
        entry: of the file, in the index of the set.
        columns: see `array_columns`.
        texts: names of the text columns.
    """
    found = FileFigures()
    data, there = b"", 0
    for info in (entry["raw_data"], entry.get("zip_data")):
        path = folder / info["basename"] if info else None
        if path is None or not path.is_file():
            continue
        there += 1
        if path.stat().st_size != info["bytes"]:
            found.faults.append(f"{path}: {path.stat().st_size:,} bytes, the index says {info['bytes']:,}")
            continue
        stored = path.read_bytes()
        data = data or stored  # where both are there, that which is not compressed
        for name, expected in info["hashes"].items():
            found.hashes += 1
            if name not in HASHES or get_hash(name, stored) != expected:
                found.faults.append(f"{path}: its {name} is not the one in the index; the file or the index is damaged")
                break
    raw = folder / entry["raw_data"]["basename"]
    where = raw if raw.is_file() or not entry.get("zip_data") else folder / entry["zip_data"]["basename"]
    if not there:
        found.faults.append(f"{where}: missing")
    if found.faults:
        return found
    try:
        with tempfile.TemporaryFile(prefix="precompose-") as scratch:
            file = locate(folder, entry, scratch)
            if file != raw:
                data = file.read_bytes()
            reader = _Reader(_info(entry, file), {name: name for name in columns}, data, texts)
            reader.path = str(where)  # and not that of the scratch file
    except MemoryError:  # the file may be whole
        raise
    except Exception as error:  # compression libraries have errors of their own
        found.faults.append(f"{where}: cannot be opened ({error})")
        return found
    for name, column in columns.items():
        stored = reader.arrays[name]
        if stored != ArrayColumn(column.shape, torch.from_numpy(np.empty(0, column.dtype)).dtype):
            found.faults.append(
                f"{where}: column {name} has {stored.dtype} {stored.shape} by the index, and {column.dtype} "
                f"{column.shape} by the manifest"
            )
    if found.faults:
        return found
    _count(reader, {name: column for name, column in columns.items() if column.counted}, found)
    return found


def open_file(folder: Path, entry: Shard, columns: Mapping[str, str], scratch: Any) -> ColumnReader:
    """A reader of an MDS file, decompressed into the file `scratch` where it must be. See `ColumnReader`."""
    return ColumnReader(_info(entry, locate(folder, entry, scratch)), columns, TEXTS)


def _info(entry: Shard, file: Path) -> Reader:
    values = {**entry, "raw_data": {**entry["raw_data"], "basename": file.name}}
    return reader_from_json(str(file.parent), None, values)


class _Reader(ColumnReader):
    """A `ColumnReader` of a file that is in memory."""

    def __init__(self, shard: Reader, columns: Mapping[str, str], data: bytes, texts: Sequence[str]) -> None:
        super().__init__(shard, columns, texts)
        self._data = memoryview(data)

    def get_sample_data(self, idx: int) -> memoryview:
        begin, end = self.place(self._data[4 * (1 + idx) :][:8], len(self._data))
        return self._data[begin:end]


def _count(reader: ColumnReader, columns: Mapping[str, Column], found: FileFigures) -> None:
    """Adds the figures of all samples, up to the first that is damaged."""
    memory = {name: np.empty((CHUNK, *column.shape), column.dtype) for name, column in columns.items()}
    rows = {name: array.view(np.uint8).reshape(CHUNK, -1) for name, array in memory.items()}
    for begin in range(0, reader.samples, CHUNK):
        size = min(CHUNK, reader.samples - begin)
        for row in range(size):
            try:
                sample = reader.get_item(begin + row)
            except ValueError as error:
                found.faults.append(str(error))
                return
            for name, array in rows.items():
                array[row] = sample.arrays[name]
        found.samples += size
        for name, column in columns.items():
            found.columns.setdefault(name, ColumnFigures()).add(column.figures(memory[name][:size]))


def print_faults(faults: Sequence[str], file: Path) -> None:
    """Prints the first faults of a set, and in which file its figures are."""
    for fault in faults[:FAULTS]:
        log.info(f"  fault: {fault}")
    if len(faults) > FAULTS:
        log.info(f"  and {len(faults) - FAULTS:,} more faults")
    log.info(f"  {'the set has faults' if faults else 'no faults'}; the figures are in {file}")
