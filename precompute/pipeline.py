"""Decoding workers -> encoders -> writer thread. The encoder starts the next batch before the last is written."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.sources.base import Rejected
from precompute.decode import Batch, Job
from precompute.progress import Progress
from precompute.writer import Encoded, ShardWriter, crop_column
from recipes.encoders.base import ImageEncoder, Stored, TextEncoder

NONFINITE_LATENT = "nonfinite_latent"
NONFINITE_TEXT = "nonfinite_text"


@dataclass
class Encodings:
    """A batch's results on their way to the CPU.

    Attributes:
        images: what is stored of the pictures, by resolution.
        text: float16 (B, L, D); None where captions are not embedded.
        image_ok, text_ok: bool (B,): every value is finite as stored.
        ready: on a GPU, the event after the copies.
    """

    images: dict[int, Stored]
    text: Tensor | None
    image_ok: Tensor
    text_ok: Tensor
    ready: Any = None

    def to_cpu(self) -> Encodings:
        """Starts copies into pinned memory where the results are on a GPU."""
        if self.image_ok.device.type == "cpu":
            return self

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

        images = {
            resolution: Stored({n: copy(a) for n, a in s.arrays.items()}, copy(s.finite), copy(s.sums))
            for resolution, s in self.images.items()
        }
        text, image_ok, text_ok = copy(self.text), copy(self.image_ok), copy(self.text_ok)
        ready = torch.cuda.Event()
        ready.record()
        return Encodings(images, text, image_ok, text_ok, ready)

    def wait(self) -> None:
        """Until the copies are there."""
        if self.ready is not None:
            self.ready.synchronize()

    @property
    def in_flight(self) -> bool:
        return self.ready is not None and not self.ready.query()


def encode(
    pixels: dict[int, Tensor], tokens: Tensor, images: ImageEncoder, texts: TextEncoder | None, exact: bool = False
) -> Encodings:
    """Encodes a batch as it will be stored.

    Args:
        pixels: uint8 (B, N, R, R, 3) by resolution, of N crops.
        tokens: int64 (B, L).
        images, texts: the encoders, on one device; no `texts` where captions are not embedded.
        exact: in fp32 with weights as stored.
    """
    stored = {r: images.store(squares.to(images.device, non_blocking=True), exact) for r, squares in pixels.items()}
    image_ok = torch.stack([s.finite for s in stored.values()]).all(0)
    if texts is None:
        return Encodings(stored, None, image_ok, torch.ones_like(image_ok))
    text = texts.encode_tokens(tokens.to(texts.device, non_blocking=True), exact=exact).half()
    return Encodings(stored, text, image_ok, text.isfinite().flatten(1).all(1))


@dataclass
class Result:
    """A batch, encoded, for the writer: (batch, arrays by name and resolution, reasons by row)."""

    batch: Batch
    encodings: Encodings | None
    aside: dict[int, str] = field(default_factory=dict)
    reencoded: set[int] = field(default_factory=set)


class Pipeline:
    """Encodes batches of jobs and hands them to a writer thread.

    Args:
        images, texts: encoders, on their device; no `texts` where captions are not embedded.
        open_writer: makes the writer of a job's output.
        publish: called with a job and its done marker when its folder is complete.
        progress: counts.
    """

    def __init__(
        self,
        images: ImageEncoder,
        texts: TextEncoder | None,
        open_writer: Callable[[Job], ShardWriter],
        publish: Callable[[Job, dict[str, Any]], None],
        progress: Progress,
    ) -> None:
        self.images, self.texts = images, texts
        self.open_writer, self.publish, self.progress = open_writer, publish, progress
        self.writers: dict[Job, ShardWriter] = {}
        self.failed: dict[Job, str] = {}
        self.waited = 0.0  # seconds in which the encoder had nothing to do
        self._results: queue.Queue[Result | None] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None

    def run(self, batches: Any) -> None:
        """Encodes every batch and returns when all is written. Unfinished jobs leave no folder behind.

        Raises:
            Whatever broke in a worker, in the encoders or in the writer.
        """
        thread = threading.Thread(target=self._write_all, name="writer", daemon=True)
        thread.start()
        try:
            before: Result | None = None
            source = iter(batches)
            while (batch := self._next(source, before)) is not None:
                current = Result(batch, None)
                if batch.pictures:
                    current.encodings = encode(batch.pixels, batch.tokens, self.images, self.texts).to_cpu()
                # The device works on the new batch while the one before it is checked and written.
                if before is not None:
                    self._hand_over(before)
                before = current
            if before is not None:
                self._hand_over(before)
        finally:
            self._put(None)
            thread.join()
            for writer in self.writers.values():
                writer.abandon()
        if self._error is not None:
            raise self._error

    def _next(self, source: Any, before: Result | None) -> Batch | None:
        started = time.monotonic()
        batch = next(source, None)
        busy = before is not None and before.encodings is not None and before.encodings.in_flight
        if not busy:
            self.waited += time.monotonic() - started
        return batch

    def _hand_over(self, result: Result) -> None:
        if result.encodings is not None:
            result.encodings.wait()
            bad = (~(result.encodings.image_ok & result.encodings.text_ok)).nonzero().flatten().tolist()
            if bad:
                self._again(result, bad)
        self._put(result)

    def _again(self, result: Result, rows: list[int]) -> None:
        """Encodes rows with values that are not finite once more, in fp32; those that stay so are set aside."""
        batch, kept = result.batch, result.encodings
        pixels = {r: squares[rows] for r, squares in batch.pixels.items()}
        tokens = batch.tokens if self.texts is None else batch.tokens[rows]
        fresh = encode(pixels, tokens, self.images, self.texts, exact=True).to_cpu()
        fresh.wait()
        for i, row in enumerate(rows):
            if fresh.image_ok[i] and fresh.text_ok[i]:
                result.reencoded.add(row)
                for resolution, old in kept.images.items():
                    new = fresh.images[resolution]
                    for name in old.arrays:
                        old.arrays[name][row] = new.arrays[name][i]
                    if old.sums is not None:
                        old.sums[row] = new.sums[i]
                if kept.text is not None:
                    kept.text[row] = fresh.text[i]
            else:
                result.aside[row] = NONFINITE_TEXT if fresh.image_ok[i] else NONFINITE_LATENT

    def _put(self, result: Result | None) -> None:
        # A writer that died takes nothing any more: notice it instead of waiting for ever.
        while self._error is None:
            try:
                return self._results.put(result, timeout=0.5)
            except queue.Full:
                continue
        if result is not None:
            raise self._error

    # --- in the writer's thread ---------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while (result := self._results.get()) is not None:
                self._write(result)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _write(self, result: Result) -> None:
        batch = result.batch
        for place, aside in batch.rejected:
            self._add(place.job, place.number, aside)
        for row, picture in enumerate(batch.pictures):
            if row in result.aside:
                sample: Encoded | Rejected = Rejected(picture.key, result.aside[row], "also in fp32")
            else:
                sample = self._sample(result, row)
            self._add(picture.place.job, picture.place.number, sample)
        for job, total in batch.ends:
            if job not in self.failed:
                self._writer(job).end(total)
        for job, problem in batch.failures:
            self.failed.setdefault(job, problem)
            if job in self.writers:
                self.writers.pop(job).abandon()
        for job in [job for job, writer in self.writers.items() if writer.complete]:
            done = self.writers.pop(job).finish()
            self.publish(job, done)
            self.progress.shard_done(done["samples"] + sum(done["rejected"].values()))
        aside = len(batch.rejected) + len(result.aside)
        self.progress.update(len(batch.pictures) - len(result.aside), aside)

    def _writer(self, job: Job) -> ShardWriter:
        if job not in self.writers:
            self.writers[job] = self.open_writer(job)
        return self.writers[job]

    def _add(self, job: Job, number: int, sample: Encoded | Rejected) -> None:
        if job not in self.failed:
            self._writer(job).add(number, sample)

    def _sample(self, result: Result, row: int) -> Encoded:
        picture, values = result.batch.pictures[row], result.encodings
        columns: dict[str, Any] = {
            "key": picture.key,
            "caption": picture.caption,
            "width": picture.width,
            "height": picture.height,
        }
        if values.text is not None:
            columns["text"] = values.text[row].numpy()
        for resolution, stored in values.images.items():
            columns[f"crop_{resolution}"] = crop_column(self.images.kind, picture.boxes[resolution])
            for name, array in stored.arrays.items():
                columns[f"{name}_{resolution}"] = array[row].numpy().astype(self.images.dtype, copy=False)
        return Encoded(
            columns,
            {r: stored.sums[row].numpy() for r, stored in values.images.items() if stored.sums is not None},
            tuple(resolution for resolution in values.images if picture.short_side < resolution),
            row in result.reencoded,
        )
