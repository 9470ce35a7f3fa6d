"""Arrays of fixed shape, read from MDS shards straight into a batch's memory.

streaming reads a sample whole, slices each column out of it (a copy), and the collation copies that into the batch.
Here a sample is one `preadv` whose targets are the batch's own rows; what lies between the wanted columns goes to a
scratch buffer. Texts stored before the arrays (the key, a caption) come with the same read. Nothing is unpickled.

A shard, as streaming's `MDSWriter` (version 2) writes it: uint32 count; uint32 begin of each sample and end of the last
one; a JSON text; samples. A sample: uint32 size of each column of variable size; the columns, sorted by name.
"""

from __future__ import annotations

import difflib
import os
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from streaming.base.format import Reader
from streaming.base.format.mds.encodings import get_mds_encoded_size
from streaming.base.format.mds.reader import MDSReader

OPEN_SHARDS = 128  # a process keeps open; opening anew costs about as much as reading one more small column
LONGEST_SKIP = 1 << 14  # bytes between two wanted columns; over more than that a second read is cheaper


@dataclass(frozen=True)
class Array:
    """Shape and number format of a column."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where the wanted columns lie in a sample.

    Attributes:
        arrays: by the name in the batch.
        sizes: number of uint32 in front of the sample, one for each column of variable size.
        texts: of each wanted text, which of them is its own, and bytes of the columns of fixed size before it.
        before: bytes of the columns of fixed size before the first array.
        after: bytes from the first array to the sample's end.
        runs: what is read at once: bytes from the first array to where the run begins, and its parts in stored order
            as (name of an array, or None for what is skipped; bytes).
    """

    arrays: dict[str, Array]
    sizes: int
    texts: tuple[tuple[int, int], ...]
    before: int
    after: int
    runs: tuple[tuple[int, tuple[tuple[str | None, int], ...]], ...]

    @classmethod
    def of(cls, shard: Reader, columns: Mapping[str, str], texts: Sequence[str] = ("key",)) -> Layout:
        """The layout of a shard's samples.

        Args:
            shard: reader of the shard.
            columns: columns of the arrays, by the name in the batch.
            texts: columns of the texts.

        Raises:
            ValueError: no MDS shard, a missing column, an array without a fixed shape and number format, a text that is
                no str, or a column of variable size stored after the first array.
        """
        if not isinstance(shard, MDSReader):
            raise ValueError(f"{shard.dirname}: batches are read from MDS shards, these need {type(shard).__name__}")
        where = path_of(shard)
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        for column in (*texts, *columns.values()):
            if column not in encodings:
                close = difflib.get_close_matches(column, encodings, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(encodings)}"
                raise ValueError(f"{where}: no column `{column}`; {hint}")
        for text in texts:
            if encodings[text] != "str":
                raise ValueError(
                    f"{where}: column `{text}` is {encodings[text]}, texts are read from str; encode the set again"
                )
        arrays = {name: _array(column, encodings[column], where) for name, column in columns.items()}

        stored = [(name, get_mds_encoded_size(encoding)) for name, encoding in encodings.items()]
        names = [name for name, _ in stored]
        first = min(names.index(column) for column in columns.values())
        head, tail = stored[:first], stored[first:]
        for name, size in tail:
            if size is None:
                raise ValueError(
                    f"{where}: column `{name}` of variable size is stored after `{names[first]}` (columns are sorted "
                    "by name); write the set with another name for it"
                )
        variable = [name for name, size in head if size is None]
        return cls(
            arrays=arrays,
            sizes=len(variable),
            texts=tuple(
                (variable.index(text), sum(size or 0 for _, size in stored[: names.index(text)])) for text in texts
            ),
            before=sum(size or 0 for _, size in head),
            after=sum(size for _, size in tail),
            runs=_runs(tail, {column: name for name, column in columns.items()}),
        )


def layouts(shards: Sequence[Reader], columns: Mapping[str, str], texts: Sequence[str] = ("key",)) -> list[Layout]:
    """`Layout.of` for each shard.

    Raises:
        ValueError: as `Layout.of`; also if the arrays differ from shard to shard.
    """
    known: dict[tuple[str, ...], Layout] = {}
    found = []
    for shard in shards:
        stored = (*getattr(shard, "column_names", ()), *getattr(shard, "column_encodings", ()))
        layout = known.get(stored) or known.setdefault(stored, Layout.of(shard, columns, texts))
        first = found[0] if found else layout
        for name, array in layout.arrays.items():
            if array != first.arrays[name]:
                raise ValueError(
                    f"{path_of(shard)}: column `{columns[name]}` holds {array}, other shards {first.arrays[name]}; "
                    "sets that are mixed must be encoded alike"
                )
        found.append(layout)
    return found


def path_of(shard: MDSReader) -> str:
    """The uncompressed file of a shard."""
    return os.path.join(shard.dirname, shard.split or "", shard.raw_data.basename)


def _array(column: str, encoding: str, where: str) -> Array:
    kind, *rest = encoding.split(":")
    if kind != "ndarray" or len(rest) != 2:
        raise ValueError(
            f"{where}: column `{column}` is {encoding}, but batches are read from arrays of fixed shape and number "
            "format, such as ndarray:float16:4,32,32; encode the set again with precompute/encode.py"
        )
    dtype = torch.from_numpy(np.empty(0, rest[0])).dtype
    return Array(tuple(map(int, rest[1].split(","))), dtype)


def _runs(
    tail: Sequence[tuple[str, int]], wanted: Mapping[str, str]
) -> tuple[tuple[int, tuple[tuple[str | None, int], ...]], ...]:
    runs: list[tuple[int, list[tuple[str | None, int]]]] = []
    offset = end = 0  # of the column, and of the last wanted one
    for column, size in tail:
        if column in wanted:
            gap = offset - end
            if not runs or gap > LONGEST_SKIP:
                runs.append((offset, []))
            elif gap:
                runs[-1][1].append((None, gap))
            runs[-1][1].append((wanted[column], size))
            end = offset + size
        offset += size
    return tuple((begin, tuple(parts)) for begin, parts in runs)


class OpenShard(NamedTuple):
    """An open file.

    Attributes:
        file: its descriptor.
        begins: uint32 begin of each sample, and the last one's end.
        path: for messages.
    """

    file: int
    begins: memoryview
    path: str

    @classmethod
    def of(cls, shard: MDSReader) -> OpenShard:
        """Opens a shard. Errors as `OpenShards.get`."""
        path = path_of(shard)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size, promised = os.fstat(file).st_size, shard.raw_data.bytes
            header = memoryview(os.pread(file, 4 * (shard.samples + 2), 0))
            if size != promised or header[:4].cast("I")[0] != shard.samples:
                raise ValueError(
                    f"{path}: {size} bytes that do not match its index.json ({promised} bytes, {shard.samples} "
                    "samples); delete it if it is a copy that is fetched again, or encode the set again"
                )
        except BaseException:
            os.close(file)
            raise
        return cls(file, header[4:].cast("I"), path)


class OpenShards:
    """The shards that this process used last, open. Pickled without them: a descriptor is valid in its process alone.

    Args:
        limit: files open at once.
    """

    def __init__(self, limit: int = OPEN_SHARDS) -> None:
        self.limit = limit
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def get(self, number: int, shard: MDSReader) -> OpenShard:
        """A shard by its number in the data set.

        Raises:
            FileNotFoundError: it is not there (any more).
            ValueError: it does not match the set's index.
        """
        found = self._open.get(number)
        if found is None:
            if len(self._open) >= self.limit:
                os.close(self._open.popitem(last=False)[1].file)
            found = self._open[number] = OpenShard.of(shard)
        else:
            self._open.move_to_end(number)
        return found

    def keep(self, numbers: Container[int]) -> None:
        """Closes all but these, so that the space of deleted files is given back."""
        for number in [n for n in self._open if n not in numbers]:
            os.close(self._open.pop(number).file)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __reduce__(self) -> tuple[type[OpenShards], tuple[int]]:
        return OpenShards, (self.limit,)

    def __del__(self) -> None:
        self.keep(())


class Rows:
    """A batch's memory, filled row by row.

    Args:
        tensors: contiguous (B, *shape) CPU tensors by the names of the layouts' arrays.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows = {name: memoryview(tensor.numpy()).cast("B") for name, tensor in tensors.items()}
        self._head = memoryview(bytearray(4096))
        self._skipped = memoryview(bytearray(LONGEST_SKIP))

    def fill(self, row: int, layout: Layout, shard: OpenShard, sample: int) -> list[str]:
        """Reads a sample of a shard into a row.

        Returns:
            its texts.

        Raises:
            ValueError: the sample is not whole.
        """
        begin, end = shard.begins[sample], shard.begins[sample + 1]
        head = end - begin - layout.after
        if head > len(self._head):
            self._head = memoryview(bytearray(head))
        whole = head >= 4 * layout.sizes + layout.before
        targets = [self._head[:head]]  # goes with the first run
        for offset, parts in layout.runs if whole else ():
            wanted = 0
            for name, size in parts:
                wanted += size
                if name is None:
                    targets.append(self._skipped[:size])
                else:
                    targets.append(self._rows[name][row * size : (row + 1) * size])
            if offset == 0:
                got = os.preadv(shard.file, targets, begin) - head
            else:
                got = os.preadv(shard.file, targets, begin + head + offset)
            whole &= got == wanted
            targets = []
        sizes = self._head[: 4 * layout.sizes].cast("I") if whole else ()
        if not whole or sum(sizes) + 4 * layout.sizes + layout.before != head:
            raise ValueError(f"{shard.path}: sample {sample} is not whole; fetch the shard again, or encode it again")
        texts = []
        for place, before in layout.texts:
            start = 4 * layout.sizes + before + sum(sizes[:place])
            texts.append(str(self._head[start : start + sizes[place]], "utf-8"))
        return texts
