"""One input shard's samples, arriving in any order, to one folder of MDS files in the source's order."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from streaming import MDSWriter

from data.manifest import REJECTED
from data.sources.base import Rejected, rejected_line
from precompute.work import DONE

BASIC = {"key": "str", "caption": "str", "width": "int", "height": "int"}


@dataclass(frozen=True)
class Columns:
    """The columns of a set of latents.

    Attributes:
        latents: (channels, height, width) by resolution.
        text: (tokens, width).
    """

    latents: dict[int, tuple[int, int, int]]
    text: tuple[int, int]

    @property
    def resolutions(self) -> list[int]:
        return list(self.latents)

    def encodings(self) -> dict[str, str]:
        """MDS encodings by column."""
        columns = dict(BASIC)
        for resolution, shape in self.latents.items():
            columns[f"crop_{resolution}"] = "ndarray:int32:4"
            for name in ("mean", "std"):
                columns[f"{name}_{resolution}"] = f"ndarray:float16:{','.join(map(str, shape))}"
        columns["text"] = f"ndarray:float16:{','.join(map(str, self.text))}"
        return columns

    def bytes_per_sample(self) -> int:
        """Size of the columns of fixed size."""
        fixed = sum(2 * 2 * int(np.prod(shape)) + 16 for shape in self.latents.values())
        return fixed + 2 * int(np.prod(self.text)) + 16


@dataclass(frozen=True)
class TokenColumns:
    """The columns of a set of tokens.

    Attributes:
        grids: tokens of a crop by resolution, in raster order.
        crops: of each picture.
    """

    grids: dict[int, int]
    crops: int
    latents: ClassVar[dict] = {}  # there are no statistics of tokens

    @property
    def resolutions(self) -> list[int]:
        return list(self.grids)

    def encodings(self) -> dict[str, str]:
        """MDS encodings by column."""
        columns = dict(BASIC)
        for resolution, count in self.grids.items():
            columns[f"crop_{resolution}"] = f"ndarray:float32:{self.crops},4"
            columns[f"tokens_{resolution}"] = f"ndarray:uint16:{self.crops},{count}"
        return columns

    def bytes_per_sample(self) -> int:
        """Size of the columns of fixed size."""
        return sum(self.crops * (2 * count + 16) for count in self.grids.values()) + 16


def crop_column(kind: str, boxes: list[tuple[float, float, float, float]]) -> np.ndarray:
    """What a crop_R column holds: the box of a picture's latents, or those of the crops whose tokens are stored."""
    return np.asarray(boxes[0], np.int32) if kind == "latents" else np.asarray(boxes, np.float32)


@dataclass(frozen=True)
class Storage:
    """How MDS files are stored (see `EncodeConfig`)."""

    size_limit: str = "64mb"
    compression: str | None = None
    hashes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A sample that was encoded.

    Attributes:
        columns: the MDS row.
        sums: by resolution, per channel over the latent's pixels: sums of mean, of mean squared, and of variance,
            float64 (3, channels).
        upscaled: resolutions that it was enlarged for.
        reencoded: whether it took a second pass in fp32.
    """

    columns: dict[str, Any]
    sums: dict[int, np.ndarray]
    upscaled: tuple[int, ...] = ()
    reencoded: bool = False


class ShardWriter:
    """Writes one shard. `add` each sample by its number and `end` with their count; `finish` once `complete`.

    Args:
        folder: where to write; emptied first.
        shard: the input shard's id.
        columns, storage: what is stored, and how.
        options: kept in done.json (see `work.EncodedSet.claim`).
    """

    def __init__(
        self, folder: Path, shard: str, columns: Columns | TokenColumns, storage: Storage, options: dict[str, Any]
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.shard = shard
        self.columns = columns
        self.options = options
        self.started = time.time()
        self.total: int | None = None
        self.next = 0
        self.samples = 0
        self.reencoded = 0
        self.rejected: Counter[str] = Counter()
        self.upscaled: Counter[int] = Counter()
        self.pixels = {r: shape[1] * shape[2] for r, shape in columns.latents.items()}
        self.sums = {r: np.zeros((3, shape[0])) for r, shape in columns.latents.items()}
        self._rejected_lines: list[str] = []
        self._early: dict[int, Encoded | Rejected] = {}
        self._mds = MDSWriter(
            out=str(folder),
            columns=columns.encodings(),
            compression=storage.compression,
            hashes=list(storage.hashes),
            size_limit=storage.size_limit,
        )

    def add(self, number: int, sample: Encoded | Rejected) -> None:
        """Takes the sample of that place in the source's order; writes it once all before it are there."""
        assert number >= self.next and number not in self._early, (self.shard, number)
        self._early[number] = sample
        while self.next in self._early:
            self._write(self._early.pop(self.next))
            self.next += 1

    def end(self, total: int) -> None:
        """Says how many samples, rejected ones included, the shard has."""
        assert self.total in (None, total), (self.shard, self.total, total)
        self.total = total

    @property
    def complete(self) -> bool:
        return self.next == self.total

    def _write(self, sample: Encoded | Rejected) -> None:
        if isinstance(sample, Rejected):
            self.rejected[sample.reason] += 1
            self._rejected_lines.append(rejected_line(self.shard, sample) + "\n")
            return
        self._mds.write(sample.columns)
        self.samples += 1
        self.reencoded += sample.reencoded
        for resolution, sums in sample.sums.items():
            self.sums[resolution] += sums
        for resolution in sample.upscaled:
            self.upscaled[resolution] += 1

    def finish(self) -> dict[str, Any]:
        """Closes the files and writes done.json, whose content it returns."""
        assert self.complete and not self._early, self.shard
        self._mds.finish()
        (self.folder / REJECTED).write_text("".join(self._rejected_lines), encoding="utf-8")
        done = {
            "shard": self.shard,
            "samples": self.samples,
            "rejected": dict(self.rejected),
            "reencoded": self.reencoded,
            "upscaled": {str(r): self.upscaled[r] for r in self.columns.resolutions},
            "bytes": sum(path.stat().st_size for path in self.folder.glob("shard.*")),
            "seconds": round(time.time() - self.started, 3),
            "latents": {
                str(r): {
                    "count": self.samples * self.pixels[r],
                    **{name: list(row) for name, row in zip(("mean", "square", "variance"), sums, strict=True)},
                }
                for r, sums in self.sums.items()
            },
            "options": self.options,
        }
        (self.folder / DONE).write_text(json.dumps(done, indent=1), encoding="utf-8")
        return done

    def abandon(self) -> None:
        """Removes what was written."""
        self._mds.cancel_future_jobs()
        shutil.rmtree(self.folder, ignore_errors=True)
