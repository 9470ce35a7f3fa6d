"""Everything in the files of an encoded set, against its index and its manifest. No encoder is needed."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from data.encoded.manifest import NULL_TEXT, Manifest
from data.encoded.mds_index import Shard, read_index
from data.system.arrays import read_matrix
from precompute.checking.file_figures import LARGEST, Column, ColumnFigures, FileFigures, array_columns, open_file
from precompute.checking.reading import figures_of_files
from precompute.output.totals import moments

SHARDS = 8  # input shards of which records are drawn: each must be read again, as a whole where it is remote
MOST_ROWS = 1 << 62  # that are drawn from, as NumPy counts them
LARGEST_FP16 = float(np.uint16(LARGEST).view(np.float16))


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


def survey(
    folder: Path,
    manifest: Manifest,
    records: int,
    rng: np.random.Generator,
    workers: int = 0,
    progress: Path | None = None,
) -> Survey:
    """Reads every file of a set once.

    Args:
        folder: of the set.
        manifest: of the set.
        records: number of records to draw, from at most `SHARDS` input shards.
        rng: draws them.
        workers, progress: see `figures_of_files`. The result does not depend on them.

    Raises:
        FileNotFoundError, ValueError: there is no index, or it is none of MDS shards.
    """
    entries = read_index(folder)
    wanted = _draw(entries, records, rng)
    columns = array_columns(manifest)
    total = figures_of_files(folder, entries, columns, workers, progress)
    found = Survey(total.samples, len(entries), total.hashes, faults=total.faults)
    for name, column in columns.items():
        if column.counted:
            _report(name, column, total.columns.get(name, ColumnFigures()), found)
    counted = sum(entry["samples"] for entry in entries)
    if counted != manifest.samples:
        found.faults.append(f"{folder}/index.json: {counted} samples, the manifest says {manifest.samples}")
    if not found.faults:
        # Where a file is damaged or a value is not finite, other statistics follow from that and say nothing more, and
        # nothing is encoded again.
        _compare_statistics(total, manifest, found)
        found.records = _read_records(folder, entries, wanted, columns)
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


def _read_records(
    folder: Path, entries: list[Shard], wanted: dict[int, set[int]], columns: dict[str, Column]
) -> list[Record]:
    """The rows that were drawn, in the order of the files. All files have been read before."""
    records = []
    with tempfile.TemporaryFile(prefix="precompose-") as scratch:
        for number in sorted(wanted):
            reader = open_file(folder, entries[number], {name: name for name in columns}, scratch)
            for row in sorted(wanted[number]):
                sample = reader.get_item(row)
                arrays = {
                    name: np.frombuffer(sample.arrays[name].tobytes(), column.dtype).reshape(column.shape)
                    for name, column in columns.items()
                }
                records.append(Record(_input_shard(entries[number]), *sample.texts, arrays))
    return records


def _compare_statistics(total: FileFigures, manifest: Manifest, found: Survey) -> None:
    for resolution, expected in manifest.latents.items():
        mean, std = total.columns[f"mean_{resolution}"], total.columns[f"std_{resolution}"]
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


def _report(name: str, column: Column, figures: ColumnFigures, found: Survey) -> None:
    """Puts the figures of a column into the survey."""
    found.nonfinite[name], found.saturated[name] = figures.nonfinite, figures.saturated
    found.largest[name] = figures.largest
    if figures.nonfinite:
        found.faults.append(f"column {name}: {figures.nonfinite:,} values are not finite")
    if figures.saturated:
        limit = f"at the largest fp16, {LARGEST_FP16:g}" if column.codes is None else f"not below {column.codes} codes"
        found.faults.append(f"column {name}: {figures.saturated:,} values are {limit}")
    if column.codes is not None:
        found.used[name] = len(figures.seen)


def figures(found: Survey) -> dict[str, Any]:
    """A survey's figures as JSON-compatible values."""
    names = ("samples", "files", "hashes", "nonfinite", "saturated", "largest", "used")
    return {name: getattr(found, name) for name in names}
