"""Chosen columns of an MDS shard as views of a sample's bytes, where streaming's own reader copies every column."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from streaming.base.format import Reader
from streaming.base.format.mds.encodings import get_mds_encoded_size
from streaming.base.format.mds.reader import MDSReader
from streaming.base.hashing import get_hash

from data.system.disk_errors import disk_error, disk_line, may_pass
from data.system.errors import WorkersError
from data.system.memory import MEMORY
from data.system.side_by_side import side_by_side


class DamagedError(WorkersError, ValueError):
    """A file of a set is damaged, or a sample in it is; or the disk does not give it."""


class LostError(DamagedError):
    """The mount of a set does not answer, and later may."""


@dataclass(frozen=True)
class ArrayColumn:
    """Shape and dtype of a column."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StoredSample(NamedTuple):
    """The chosen columns of one sample.

    Attributes:
        texts: the text columns, in the order of the argument `texts`.
        arrays: uint8 (bytes,) of each array column, by its name in the batch. They are views of the sample's bytes.
        weight: with which the sample counts in means over a validation set.
    """

    texts: list[str]
    arrays: dict[str, np.ndarray]
    weight: float = 1.0


class ColumnReader(MDSReader):
    """Reads an MDS shard whose samples are given as `StoredSample`.

    A sample in an MDS shard (version 2) is one uint32 size for each column of variable size, then the values of all
    columns, in the order of `column_names`.

    Args:
        shard: streaming's reader of the same shard.
        columns: names of the array columns, by their names in the batch.
        texts: names of the text columns.
        looks: whether the size of the file is looked up, and not only what the index says of it.

    Raises:
        ValueError: the shard is no MDS shard, a column is missing, an array column has no fixed shape and dtype, a
            text column is not of type str, or the file has no room for its samples.
    """

    def __init__(
        self, shard: Reader, columns: Mapping[str, str], texts: Sequence[str] = ("key",), looks: bool = True
    ) -> None:
        if not isinstance(shard, MDSReader):
            raise ValueError(f"{shard.dirname}: encoded sets are MDS shards, and this is a {type(shard).__name__}")
        super().__init__(
            dirname=shard.dirname,
            split=shard.split,
            column_encodings=shard.column_encodings,
            column_names=shard.column_names,
            column_sizes=shard.column_sizes,
            compression=shard.compression,
            hashes=shard.hashes,
            raw_data=shard.raw_data,
            samples=shard.samples,
            size_limit=shard.size_limit,
            zip_data=shard.zip_data,
        )
        self.path = os.path.join(self.dirname, self.split, self.raw_data.basename)
        self._check: str | None = None
        try:
            self._layout = _layout(
                tuple(self.column_names), tuple(self.column_encodings), tuple(columns.items()), tuple(texts)
            )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self.arrays = self._layout.arrays
        self.check_size(looks)

    def check_size(self, looks: bool = True) -> None:
        """The index says how large a sample is, and whoever reads it takes memory for it: the file must be as large.

        Args:
            looks: see `ColumnReader`.

        Raises:
            ValueError: it is smaller.
        """
        needed = 4 + self.samples * (4 + 4 * self._layout.variable + self._layout.fixed)
        known = min(self.raw_data.bytes, MEMORY)
        if looks:
            with suppress(OSError):  # others are fetched, or decompressed
                known = min(known, os.path.getsize(self.path))
        if needed > known:
            raise ValueError(
                f"{self.path}: {self.samples} samples of {self._layout.fixed:,} bytes and more, as the index says, are "
                f"{needed:,} bytes, and it has room for {known:,}; copy the set again, or encode it again"
            )

    def check_with(self, algorithm: str | None) -> None:
        """Compare the file with its hash in the index when a process first reads from it.

        Args:
            algorithm: name of the hash, such as xxh64; None: no check.

        Raises:
            ValueError: the index has no such hash of the file.
        """
        if algorithm is not None and algorithm not in self.raw_data.hashes:
            known = ", ".join(self.raw_data.hashes) or "none"
            raise ValueError(
                f"{self.path}: validate_hash is {algorithm}, and the set was written with {known}; encode with "
                f"hashes=[{algorithm}], or set validate_hash to null"
            )
        self._check = algorithm

    def _compare_hash(self) -> None:
        with open(self.path, "rb") as file:
            found = get_hash(self._check, file.read())
        if found != self.raw_data.hashes[self._check]:
            raise DamagedError(
                f"{self.path}: damaged, its {self._check} is {found} and not {self.raw_data.hashes[self._check]} as in "
                "the index; copy the file again, or delete its folder and start the encode job again"
            )
        self._check = None

    def get_item(self, idx: int) -> StoredSample:
        """Reads one sample.

        Raises:
            FileNotFoundError: the shard is not on this disk (any more).
            DamagedError: the sample is damaged, or the file is (see `check_with`), or the disk does not give it.
        """
        try:
            if self._check is not None:
                self._compare_hash()
            return self.decode_sample(self.get_sample_data(idx))
        except DamagedError:
            raise
        except ValueError as error:
            raise DamagedError(
                f"{self.path}: sample {idx} is damaged ({error}); delete the file if it is a copy that is fetched "
                "again, or encode the set again"
            ) from None
        except OSError as error:
            error.filename = error.filename or self.path  # a failed read names no file
            if disk_error(error) is None:
                raise
            kind = LostError if may_pass(error) else DamagedError
            raise kind(disk_line(error)) from None  # an OSError of a worker process would lose its number

    def get_sample_data(self, idx: int) -> bytes:
        """The bytes of a sample. Where it lies is compared with the file's size before anything is read.

        Raises:
            ValueError: the sample is not inside of the file.
        """
        with open(self.path, "rb", 0) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(4 * (1 + idx))
            begin, end = self.place(file.read(8), size)
            file.seek(begin)
            return file.read(end - begin)

    @staticmethod
    def place(offsets: bytes, size: int) -> tuple[int, int]:
        """Where a sample begins and ends in a file of `size` bytes, by the offsets of it and the next, 8 bytes.

        Raises:
            ValueError: it is not inside of the file.
        """
        begin, end = np.frombuffer(offsets, np.uint32).tolist() if len(offsets) == 8 else (size, size)
        if not 0 < begin < end <= size:
            raise ValueError(f"bytes {begin} to {end} of a file of {size} bytes")
        return begin, end

    def decode_sample(self, data: bytes) -> StoredSample:
        """Finds the chosen columns in a sample's bytes.

        Raises:
            ValueError: there are more or fewer bytes than the columns have.
        """
        layout = self._layout
        head = 4 * layout.variable
        sizes = np.frombuffer(data, np.uint32, layout.variable).tolist()
        expected = head + layout.fixed + sum(sizes)
        if len(data) != expected:
            raise ValueError(f"{len(data)} of {expected} bytes")
        texts = []
        for fixed, variable in layout.text_places:
            begin = head + fixed + sum(sizes[:variable])
            texts.append(str(data[begin : begin + sizes[variable]], "utf-8"))
        arrays = {
            name: np.frombuffer(data, np.uint8, size, head + fixed + sum(sizes[:variable]))
            for name, fixed, variable, size in layout.array_places
        }
        return StoredSample(texts, arrays)


def column_readers(
    shards: Sequence[Reader],
    columns: Mapping[str, str],
    texts: Sequence[str] = ("key",),
    rank: int = 0,
    ranks: int = 1,
) -> list[ColumnReader]:
    """A `ColumnReader` for each shard.

    Args:
        shards: streaming's readers.
        columns: see `ColumnReader`.
        texts: see `ColumnReader`.
        rank: number of this process among `ranks` that open the same set: each looks up the sizes of its share of the
            files. A shared file system would otherwise be asked for all of them by all at the same moment.
        ranks: number of these processes.

    Raises:
        ValueError: as `ColumnReader`; also if an array column has another shape or dtype in some of the shards.
    """
    readers = [ColumnReader(shard, columns, texts, looks=False) for shard in shards]
    for _ in side_by_side(ColumnReader.check_size, readers[rank::ranks]):
        pass
    for reader in readers:
        if reader.arrays is readers[0].arrays:  # of the same layout
            continue
        for name, array in reader.arrays.items():
            first = readers[0].arrays[name]
            if array != first:
                raise ValueError(
                    f"{reader.path}: column `{columns[name]}` holds {array}, other shards hold {first}; sets that are "
                    "mixed must be encoded in the same way"
                )
    return readers


class _Layout(NamedTuple):
    """Where columns lie in a sample: behind the fixed sizes of some columns and the stored sizes of others.

    Attributes:
        fixed: bytes of all columns of fixed size.
        variable: number of the others.
        arrays: the chosen array columns, by their names in the batch.
        array_places: of each, its name in the batch, the fixed bytes and the number of variable columns before it, and
            its bytes.
        text_places: of the chosen text columns, the same two numbers.
    """

    fixed: int
    variable: int
    arrays: dict[str, ArrayColumn]
    array_places: list[tuple[str, int, int, int]]
    text_places: list[tuple[int, int]]


@lru_cache(maxsize=64)  # all files of a set have one layout, and a set may have a million files
def _layout(
    names: tuple[str, ...], kinds: tuple[str, ...], columns: tuple[tuple[str, str], ...], texts: tuple[str, ...]
) -> _Layout:
    """
    Args:
        names, kinds: all columns of a file, and their encodings.
        columns: (name in the batch, name in the file) of the array columns.
        texts: names of the text columns.

    Raises:
        ValueError: see `ColumnReader`.
    """
    encodings = dict(zip(names, kinds, strict=True))
    for column in (*texts, *(column for _, column in columns)):
        if column not in encodings:
            close = difflib.get_close_matches(column, encodings, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(encodings)}"
            raise ValueError(f"no column `{column}`; {hint}")
    for text in texts:
        if encodings[text] != "str":
            raise ValueError(
                f"column `{text}` is {encodings[text]}, but texts are read from columns of type str; encode the set "
                "again"
            )
    arrays = {name: _array(column, encodings[column]) for name, column in columns}
    begins, fixed, variable = {}, 0, 0
    for column, encoding in encodings.items():
        begins[column] = fixed, variable
        size = _size(column, encoding)
        fixed, variable = (fixed, variable + 1) if size is None else (fixed + size, variable)
    array_places = [(name, *begins[column], arrays[name].bytes) for name, column in columns]
    return _Layout(fixed, variable, arrays, array_places, [begins[text] for text in texts])


def _array(column: str, encoding: str) -> ArrayColumn:
    kind, *rest = encoding.split(":")
    if kind != "ndarray" or len(rest) != 2:
        raise ValueError(
            f"column `{column}` is {encoding}, but batches are read from arrays of fixed shape and dtype, "
            "such as ndarray:float16:4,32,32; encode the set again with precompute/encode.py"
        )
    try:
        dtype = torch.from_numpy(np.empty(0, rest[0])).dtype
        shape = tuple(map(int, rest[1].split(",")))
    except (TypeError, ValueError):
        dtype, shape = None, ()
    if dtype is None or not shape or min(shape) < 1:
        raise ValueError(f"column `{column}` is {encoding!r:.80}, which is no array; encode the set again")
    return ArrayColumn(shape, dtype)


def _size(column: str, encoding: str) -> int | None:
    """Bytes of a column's values; None where each has its own size."""
    try:
        return get_mds_encoded_size(encoding)
    except Exception:  # streaming has no error of its own for an encoding that it does not know
        message = f"column `{column}` is {encoding!r:.80}, which is no encoding of MDS; encode the set again"
        raise ValueError(message) from None
