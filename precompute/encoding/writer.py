"""Writes the samples of an input shard, which arrive in any order, to a folder of MDS files in the source's order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.sources.base import Rejected
from data.system.errors import WrongResult
from precompute.encoding.columns import LatentColumns, TokenColumns
from precompute.output.shard_folder import ShardFolder, Storage


@dataclass(frozen=True)
class EncodedSample:
    """A sample as it will be stored.

    Attributes:
        columns: the MDS row.
        sums: by resolution, float64 (3, C): the sums over a latent's pixels, per channel, of the mean, of the squared
            mean and of the variance. Empty for tokens.
        upscaled: resolutions that the image was enlarged for.
        reencoded: whether it was encoded a second time, in fp32.
    """

    columns: dict[str, Any]
    sums: dict[int, np.ndarray]
    upscaled: tuple[int, ...] = ()
    reencoded: bool = False


class ShardWriter:
    """Writes one shard.

    Call `add` once per sample and `end` once per part in which the shard was read. Call `finish` when the shard is
    `complete`, or `abandon` to give it up.

    Args:
        folder: where to write; emptied first.
        shard: the input shard's id.
        columns, storage: what is stored, and how.
        options: what the values depend on; kept in done.json (see `precompute.output.output_set.OutputSet.claim`).
    """

    def __init__(
        self,
        folder: Path,
        shard: str,
        columns: LatentColumns | TokenColumns,
        storage: Storage,
        options: dict[str, Any],
    ) -> None:
        self.shard = shard
        self.columns = columns
        self.total: int | None = None
        self.next = 0
        self.reencoded = 0
        self.upscaled: Counter[int] = Counter()
        self.pixels = {r: shape[1] * shape[2] for r, shape in columns.latents.items()}
        self.sums = {r: np.zeros((3, shape[0])) for r, shape in columns.latents.items()}
        self._ends = 0
        self._parts = 1
        self._keys: set[str] = set()
        self._early: dict[int, EncodedSample | Rejected] = {}
        self._folder = ShardFolder(folder, shard, columns.encodings(), storage, options)

    def add(self, number: int, sample: EncodedSample | Rejected) -> None:
        """Takes sample `number` of the source's order, and writes it when all samples before it have arrived.

        Raises:
            WrongResult: another sample of the shard has the same key.
        """
        assert number >= self.next and number not in self._early, (self.shard, number)
        self._early[number] = sample
        while self.next in self._early:
            self._write(self._early.pop(self.next))
            self.next += 1

    def end(self, total: int, parts: int = 1) -> None:
        """Takes the shard's number of samples, rejected ones included, from the reader of one of its parts.

        Raises:
            ValueError: the reader of another part counted another number of samples.
        """
        if self.total not in (None, total):
            raise ValueError(f"one process read samples up to number {self.total}, another up to number {total}")
        self.total = total
        self._parts = parts
        self._ends += 1

    @property
    def complete(self) -> bool:
        """Whether all parts were read to their end, and all samples have arrived."""
        return self._ends == self._parts and self.next == self.total

    def _write(self, sample: EncodedSample | Rejected) -> None:
        if isinstance(sample, Rejected):
            self._folder.reject(sample)
            return
        key = sample.columns["key"]
        if key in self._keys:
            raise WrongResult(
                f"the source yields the key {key!r:.80} twice in the shard {self.shard}; yield each key once "
                "(data.sources.base.ReadOnce), and the samples in one order, as several processes may read a shard"
            )
        self._keys.add(key)
        self._folder.write(sample.columns)
        self.reencoded += sample.reencoded
        for resolution, sums in sample.sums.items():
            self.sums[resolution] += sums
        for resolution in sample.upscaled:
            self.upscaled[resolution] += 1

    def finish(self) -> dict[str, Any]:
        """Closes the files, writes done.json and returns its content."""
        assert self.complete and not self._early, self.shard
        return self._folder.close(
            reencoded=self.reencoded,
            upscaled={str(r): self.upscaled[r] for r in self.columns.resolutions},
            latents={
                str(r): {
                    "count": self._folder.rows * self.pixels[r],
                    **{name: list(row) for name, row in zip(("mean", "square", "variance"), sums, strict=True)},
                }
                for r, sums in self.sums.items()
            },
        )

    def abandon(self) -> None:
        """Removes what was written."""
        self._folder.abandon()
