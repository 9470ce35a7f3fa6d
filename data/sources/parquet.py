"""Parquet files with the images' bytes and their captions, as Hugging Face data sets store them."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.aliases import InputPath
from data.sources.base import ReadOnce, Rejected, Sample, assemble, files_below, shard_ids, try_again
from data.sources.parquet_footer import RowGroup, row_groups
from data.sources.parquet_pages import check_pages
from data.system.memory import MEMORY
from data.system.side_by_side import side_by_side

BATCH_ROWS = 32  # a batch is held in memory, and an image may have megabytes

Part = tuple[Path, list[int], int]
"""File, row groups, and number of the first row."""


class ParquetSource:
    """One .parquet file, or all below a folder. A shard consists of consecutive row groups of one file."""

    def __init__(
        self,
        *,
        path: InputPath,
        image: str = "image",
        caption: str = "text",
        key: str | None = None,
        shard_size: int = 10_000,
    ) -> None:
        """
        Args:
            path: a .parquet file, or a folder with such files at any depth.
            image: column of the image: its file's bytes, or a struct with a field `bytes` (Hugging Face).
            caption: column of the caption.
            key: column of the key; null to make keys of the file's name and the row's number.
            shard_size: minimum number of rows per shard. Row groups are joined to reach it, but never divided.

        Raises:
            FileNotFoundError: no such file or folder, or no .parquet file in it.
            ValueError: a file that is not Parquet, a column that is missing or of the wrong type, or a row group that
                does not fit into memory.
        """
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(f"source.path: no file or folder {path}")
        if shard_size < 1:
            raise ValueError(f"source.shard_size is {shard_size}: give 1 or more rows")
        files = [root]
        if root.is_dir():
            files = sorted(root / name for name in files_below(root) if name.lower().endswith(".parquet"))
        if not files:
            raise FileNotFoundError(f"source.path: no .parquet file in {path}")
        self.image, self.caption, self.key = image, caption, key
        self.columns = list(dict.fromkeys(name for name in (image, caption, key) if name is not None))

        def divide(file: Path) -> list[tuple[str, tuple[object, ...], Part]]:
            name = file.relative_to(root) if file != root else Path(file.name)
            return list(self._divide(file, name, shard_size))

        found = list(itertools.chain.from_iterable(side_by_side(divide, files)))
        ids = shard_ids([(name, identity) for name, identity, _ in found])
        self.parts = dict(zip(ids, (part for *_, part in found), strict=True))

    def _divide(
        self, file: Path, name: Path, shard_size: int
    ) -> Iterator[tuple[str, tuple[object, ...], Part]]:
        """The shards of a file, each with what its id is made of."""
        with _open(file) as parquet:
            self._check(file, parquet.schema_arrow)
        parts = row_groups(file)
        held = [_held(part, self.columns) for part in parts]
        size = file.stat().st_size  # a file that was rewritten in another size holds other shards
        for index, part in enumerate(parts):
            stored = sum(chunk.total_compressed_size for chunk in part.chunks)
            if part.rows < 0 or not 0 <= stored <= size or not 0 <= held[index] <= MEMORY:
                raise ValueError(
                    f"{file}: row group {index} claims {stored:,} of the file's {size:,} bytes, and {held[index]:,} of "
                    f"{MEMORY:,} bytes of memory for the columns that are read; write it with smaller row groups"
                )
        filled = [index for index, part in enumerate(parts) if part.rows]  # empty row groups have no pages
        groups: list[int] = []
        first = done = 0
        for index in filled:
            groups.append(index)
            done += parts[index].rows
            if done - first >= shard_size or index == filled[-1]:
                yield f"{name.stem}_{first:08d}", (name.as_posix(), size, first, done), (file, groups, first)
                groups, first = [], done

    def _check(self, file: Path, schema: Any) -> None:
        import pyarrow.types as types

        for key, column in (("image", self.image), ("caption", self.caption), ("key", self.key)):
            if column is not None and column not in schema.names:
                raise ValueError(f"source.{key}: {file} has no column {column!r}: it has {', '.join(schema.names)}")
            if column is not None and schema.names.count(column) > 1:
                raise ValueError(f"source.{key}: {file} has several columns {column!r}: give each a name of its own")
        kind = schema.field(self.image).type
        if types.is_struct(kind):
            kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
        if not (_is_bytes(kind) or types.is_dictionary(kind) and _is_bytes(kind.value_type)):
            raise ValueError(f"{file}: column {self.image!r} is of type {kind}: it must hold the image's bytes")
        if not _is_text(schema.field(self.caption).type):
            kind = schema.field(self.caption).type
            raise ValueError(f"{file}: column {self.caption!r} is of type {kind}: it must hold text")

    def shards(self) -> list[str]:
        """One id for each run of row groups, in the order of files and rows."""
        return list(self.parts)

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one shard, in stored order (see `base.Source.read`).

        Raises:
            FileNotFoundError: the file is gone; the message names it.
            ValueError: the row groups that all decoding processes hold at the same time do not fit into memory.
        """
        if shard not in self.parts:
            raise ValueError(f"no shard {shard!r} in this source: it has {len(self.parts)}")
        import pyarrow as pa

        file, groups, number = self.parts[shard]
        once = ReadOnce()
        with _open(file) as parquet:
            parts = row_groups(file)
            held, workers = max(_held(parts[group], self.columns) for group in groups), _workers()
            if held * workers > MEMORY:
                raise ValueError(
                    f"{file}: row groups of {held:,} bytes in each of {workers} workers, more than the {MEMORY:,} of "
                    "memory; give fewer `workers`, or write it with smaller row groups"
                )
            try:
                for group in groups:  # one by one, so that a damaged one takes none of those before it
                    check_pages(file, parts[group].of(self.columns))
                    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=self.columns):
                        table = {name: _values(batch.column(name)) for name in self.columns}
                        for values in zip(*table.values(), strict=True):
                            yield once(self._sample(file, number, dict(zip(table, values, strict=True))))
                            number += 1
            except (pa.ArrowException, OSError, ValueError) as error:
                if try_again(error):
                    raise
                yield Rejected(file.name, "broken_shard", f"{error} (from row {number} on)")

    def _sample(self, file: Path, number: int, row: dict[str, Any]) -> Sample | Rejected:
        given = None if self.key is None else row[self.key]
        if isinstance(given, bytes):
            given = given.decode("utf-8", "replace")
        key = f"{file.stem}_{number:08d}" if given is None else str(given)
        return assemble(key, row[self.image], row[self.caption])


def _open(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise FileNotFoundError(f"no file {file}: a shard of the source is gone")
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        if try_again(error):
            raise
        raise ValueError(f"{file} is not a Parquet file: {' '.join(str(error).split())}") from None


def _held(group: RowGroup, columns: list[str]) -> int:
    """Bytes of memory of some columns of a row group; -1 if one claims a negative size."""
    sizes = [chunk.total_uncompressed_size for chunk in group.of(columns)]
    return -1 if min(sizes, default=0) < 0 else sum(sizes)


def _workers() -> int:
    """Number of processes of a DataLoader that read like this one."""
    data = sys.modules.get("torch.utils.data")  # whoever has a DataLoader has imported it, which takes seconds
    info = None if data is None else data.get_worker_info()
    return 1 if info is None else info.num_workers


def _is_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return _is_bytes(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _values(column: Any) -> list[Any]:
    """The values of a column, or of its field `bytes`. Text is given as bytes, because Arrow raises for a batch if one
    value is not UTF-8; so the other fields, such as a file's name, are left out."""
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.types as types

    if types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pa.compute.struct_field(column, "bytes")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()
