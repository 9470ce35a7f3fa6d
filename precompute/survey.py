"""Everything in the files of an encoded set, against its index and its manifest. No encoder is needed."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from streaming.base.format import reader_from_json
from streaming.base.hashing import get_hash

from data.arrays import read_matrix
from data.column_reader import ColumnReader, StoredSample
from data.manifest import NULL_TEXT, Manifest
from data.mds_index import HASHES, Shard, read_index
from data.sources.mds import locate
from precompute.totals import moments

SHARDS = 8  # input shards of which records are drawn: each must be read again, as a whole where it is remote
MOST_ROWS = 1 << 62  # that are drawn from, as NumPy counts them
CHUNK = 64  # samples that are looked at together
LARGEST_FP16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Record:
    """One stored sample.

    Attributes:
        shard: id of the input shard that it comes from.
        arrays: by the name of the column.
    """

    shard: str
    key: str
    caption: str
    arrays: dict[str, np.ndarray]


@dataclass
class Survey:
    """What was found in a set.

    Attributes:
        samples, files, hashes: numbers of samples, MDS files and hashes that were looked at.
        nonfinite, saturated: by column, the number of values that are NaN or infinite, and that lie at the limit of the
            format: the largest fp16, or for tokens a code that the codebook does not have.
        largest: by column, the largest magnitude.
        used: by column of tokens, the number of different codes.
        records: the records that were drawn.
        faults: one line each.
    """

    samples: int = 0
    files: int = 0
    hashes: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)
    saturated: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def survey(folder: Path, manifest: Manifest, records: int, rng: np.random.Generator) -> Survey:
    """Reads every file of a set once.

    Args:
        folder: of the set.
        manifest: of the set.
        records: number of records to draw, from at most `SHARDS` input shards.
        rng: draws them.

    Raises:
        FileNotFoundError, ValueError: there is no index, or it is none of MDS shards.
    """
    entries = read_index(folder)
    found = Survey()
    wanted = _draw(entries, records, rng)
    columns = {name: _Column(name, kind, manifest) for name, kind in manifest.columns.items() if kind[:7] == "ndarray"}
    with tempfile.TemporaryFile(prefix="precompose-") as scratch:
        for number, entry in enumerate(entries):
            reader = _open(folder, entry, scratch, list(columns), found)
            if reader is not None:
                _read(reader, _input_shard(entry), wanted.get(number, set()), columns, found)
    for name, column in columns.items():
        column.report(name, found)
    counted = sum(entry["samples"] for entry in entries)
    if counted != manifest.samples:
        found.faults.append(f"{folder}/index.json: {counted} samples, the manifest says {manifest.samples}")
    if not found.faults:
        # Where a file is damaged or a value is not finite, other statistics follow from that and say nothing more.
        _compare_statistics(columns, manifest, found)
    if manifest.text_encoder is not None:
        _check_null_text(folder / NULL_TEXT, manifest, found)
    return found


def _draw(entries: list[Shard], records: int, rng: np.random.Generator) -> dict[int, set[int]]:
    """Rows to draw by the number of their MDS file: uniform over all rows of at most `SHARDS` random input shards."""
    shards = sorted({_input_shard(entry) for entry in entries})
    chosen = set(rng.permutation(shards)[:SHARDS])
    files = [number for number, entry in enumerate(entries) if _input_shard(entry) in chosen]
    ends = list(accumulate(entries[number]["samples"] for number in files))
    wanted: dict[int, set[int]] = {}
    # No list of all rows, whose number the index may have invented.
    rows = min(ends[-1], MOST_ROWS) if ends else 0
    for row in rng.choice(rows, min(records, rows), replace=False).tolist() if rows else []:
        place = bisect_right(ends, row)
        wanted.setdefault(files[place], set()).add(row - (ends[place - 1] if place else 0))
    return wanted


def _input_shard(entry: Shard) -> str:
    """The id of the input shard that an MDS file was made of: files lie in shards/ID/."""
    return PurePosixPath(entry["raw_data"]["basename"]).parent.name


def _open(folder: Path, entry: Shard, scratch: BinaryIO, columns: list[str], found: Survey) -> ColumnReader | None:
    """A reader of one MDS file, decompressed into `scratch` where it must be; None, and a fault, if it is damaged."""
    found.files += 1
    problems = []
    there = 0
    for info in (entry["raw_data"], entry.get("zip_data")):
        path = folder / info["basename"] if info else None
        if path is None or not path.is_file():
            continue
        there += 1
        if path.stat().st_size != info["bytes"]:
            problems.append(f"{path}: {path.stat().st_size:,} bytes, the index says {info['bytes']:,}")
            continue
        data = path.read_bytes()
        for name, expected in info["hashes"].items():
            found.hashes += 1
            if name not in HASHES or get_hash(name, data) != expected:
                problems.append(f"{path}: its {name} is not the one in the index; the file or the index is damaged")
                break
    if not there:
        problems.append(f"{folder / entry['raw_data']['basename']}: missing")
    found.faults += problems
    if problems:
        return None
    try:
        file = locate(folder, entry, scratch)
        info = {**entry, "raw_data": {**entry["raw_data"], "basename": file.name}}
        return ColumnReader(
            reader_from_json(str(file.parent), None, info), {name: name for name in columns}, ("key", "caption")
        )
    except Exception as error:  # compression libraries have errors of their own
        found.faults.append(f"{folder / entry['raw_data']['basename']}: cannot be opened ({error})")
        return None


def _read(reader: ColumnReader, shard: str, wanted: set[int], columns: dict[str, _Column], found: Survey) -> None:
    for begin in range(0, reader.samples, CHUNK):
        samples = []
        for row in range(begin, min(begin + CHUNK, reader.samples)):
            try:
                sample = reader.get_item(row)
            except ValueError as error:
                found.faults.append(str(error))
                return
            samples.append(sample)
            if row in wanted:
                arrays = {name: column.array([sample])[0] for name, column in columns.items()}
                found.records.append(Record(shard, *sample.texts, arrays))
        found.samples += len(samples)
        for column in columns.values():
            column.add(column.array(samples))


def _compare_statistics(columns: dict[str, _Column], manifest: Manifest, found: Survey) -> None:
    for resolution, expected in manifest.latents.items():
        mean, std = columns[f"mean_{resolution}"], columns[f"std_{resolution}"]
        sums = {"count": mean.count, "mean": mean.sums, "square": mean.squares, "variance": std.squares}
        for name, values in moments([sums]).items():
            if not np.allclose(values, expected[name], rtol=1e-5, atol=1e-7):  # sums in another order
                found.faults.append(
                    f"{manifest.where}: {name} of the latents at {resolution} is {_short(expected[name])}, the files "
                    f"have {_short(values)}"
                )


def _short(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _check_null_text(path: Path, manifest: Manifest, found: Survey) -> None:
    try:
        null = read_matrix(path, manifest.text_shape)
    except (OSError, ValueError) as error:
        found.faults.append(f"{path}: the embedding of the empty caption cannot be read ({error})")
        return
    if null.dtype != np.float16 or not np.isfinite(null).all():
        found.faults.append(f"{path}: {null.dtype} {null.shape}, expected finite float16 {manifest.text_shape}")


class _Column:
    """Figures of an array column."""

    def __init__(self, name: str, encoding: str, manifest: Manifest) -> None:
        _, dtype, shape = encoding.split(":")
        self.dtype = np.dtype(dtype)
        self.shape = tuple(map(int, shape.split(",")))
        self.is_latent = name.startswith(("mean_", "std_"))
        self.codes = manifest.image_encoder["codes"] if name.startswith("tokens_") else None
        self.nonfinite = self.saturated = self.count = 0
        self.largest = 0.0
        self.sums: np.ndarray | float = 0.0  # (C,), over the finite values
        self.squares: np.ndarray | float = 0.0
        self.seen: np.ndarray | None = None if self.codes is None else np.zeros(1 << 16, bool)
        self.name = name

    def array(self, samples: list[StoredSample]) -> np.ndarray:
        """(B, *shape) of the column."""
        rows = [sample.arrays[self.name].tobytes() for sample in samples]
        return np.frombuffer(b"".join(rows), self.dtype).reshape(len(samples), *self.shape)

    def add(self, values: np.ndarray) -> None:
        """Counts (B, *shape)."""
        if self.codes is not None:
            self.saturated += int((values >= self.codes).sum())
            self.seen[np.unique(values)] = True
            return
        if self.dtype.kind != "f":
            return
        finite = np.isfinite(values)
        self.nonfinite += int(values.size - finite.sum())
        values = np.where(finite, values, 0).astype(np.float64)
        self.largest = max(self.largest, float(np.abs(values).max(initial=0.0)))
        if self.dtype == np.float16:
            self.saturated += int((np.abs(values) >= LARGEST_FP16).sum())
        if self.is_latent:
            self.count += len(values) * prod(self.shape[1:])
            self.sums = self.sums + values.sum((0, 2, 3))
            self.squares = self.squares + np.square(values).sum((0, 2, 3))

    def report(self, name: str, found: Survey) -> None:
        """Puts the figures into the survey."""
        if self.codes is None and self.dtype != np.float16:
            return  # crop boxes
        found.nonfinite[name], found.saturated[name], found.largest[name] = self.nonfinite, self.saturated, self.largest
        if self.nonfinite:
            found.faults.append(f"column {name}: {self.nonfinite:,} values are not finite")
        if self.saturated:
            limit = f"at the largest fp16, {LARGEST_FP16:g}" if self.codes is None else f"not below {self.codes} codes"
            found.faults.append(f"column {name}: {self.saturated:,} values are {limit}")
        if self.codes is not None:
            found.used[name] = int(self.seen.sum())


def figures(found: Survey) -> dict[str, Any]:
    """A survey's figures as JSON-compatible values."""
    names = ("samples", "files", "hashes", "nonfinite", "saturated", "largest", "used")
    return {name: getattr(found, name) for name in names}
