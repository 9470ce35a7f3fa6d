"""Decoding workers -> encoders -> writer thread -> publisher thread.

The encoders start on a batch before the last one is written, and the writer on a shard before the last one is
published.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from data.sources.base import InputShard, Rejected
from data.system.log import every_rank
from precompute.encoding.batch import DecodedBatch
from precompute.encoding.columns import crop_column
from precompute.encoding.encodings import Encodings, encode, encode_exactly
from precompute.encoding.progress import EncodeProgress
from precompute.encoding.writer import EncodedSample, ShardWriter
from precompute.output.folder_gone import FolderGone
from precompute.output.problems import Problem
from recipes.encoders.base import ImageEncoder, TextEncoder

NONFINITE_LATENT = "nonfinite_latent"
NONFINITE_TEXT = "nonfinite_text"
# Shards that may wait to be published, that is, to be brought to the disk; a kill of the job costs them. Workers that
# read shards of one size from the same moment on complete them together, and the encoders shall not wait for that.
WAITING = 16


@dataclass
class EncodedBatch:
    """A batch for the writer.

    Attributes:
        encodings: None where the batch holds no image.
        rejected: the reason by row, for rows whose values are not finite in fp32 either.
        reencoded: rows that were encoded a second time, in fp32.
    """

    batch: DecodedBatch
    encodings: Encodings | None
    rejected: dict[int, str] = field(default_factory=dict)
    reencoded: set[int] = field(default_factory=set)


class EncodePipeline:
    """Encodes batches and passes them to a writer thread.

    Args:
        images: the image encoder, on its device.
        texts: the text encoder, on the same device; None where captions are not embedded.
        open_writer: returns the writer of a shard's output.
        publish: called with a shard whose folder is complete, for one shard at a time, in a thread of its own: it takes
            a while to bring a shard to the disk.
        progress: counts images and shards.
        give_up: called with a shard that could not be read, and the reason.
        keep: called with the shards of each batch, when it is written.

    Attributes:
        failed: after `run`, the shards that could not be read, each with its reason.
        finished: shards that were published, by this rank or by another that took it for lost.
        waited: seconds in which the encoders had nothing to do.
        full_captions: encoded captions that take all positions of the text encoder, most of them because they were cut.
    """

    def __init__(
        self,
        images: ImageEncoder,
        texts: TextEncoder | None,
        open_writer: Callable[[InputShard], ShardWriter],
        publish: Callable[[InputShard], None],
        progress: EncodeProgress,
        give_up: Callable[[InputShard, Problem], None] = lambda shard, problem: None,
        keep: Callable[[Collection[InputShard]], None] = lambda shards: None,
    ) -> None:
        self.images, self.texts = images, texts
        self.open_writer, self.publish, self.progress = open_writer, publish, progress
        self.give_up, self.keep = give_up, keep
        self.writers: dict[InputShard, ShardWriter] = {}
        self.failed: dict[InputShard, Problem] = {}
        self.finished: set[InputShard] = set()
        self.waited = 0.0
        self.full_captions = 0
        if texts is not None:
            begin_end_padding = texts.tokenize([""])[0]
            self._padding = begin_end_padding[-1]
            # Where the end mark is also the padding, the token before the last one is a word's only without padding.
            self._last = -2 if begin_end_padding[1] == self._padding else -1
        self._results: queue.Queue[EncodedBatch | None] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None

    def run(self, batches: Iterable[DecodedBatch]) -> None:
        """Encodes every batch and returns when all of them are written. Removes the folders of unfinished shards.

        It may be called again, for what is left after an error.

        Raises:
            Any error of a worker, of the encoders or of the writer.
        """
        publisher = ThreadPoolExecutor(1, "publisher")
        thread = threading.Thread(target=self._write_all, args=[publisher], name="writer", daemon=True)
        thread.start()
        try:
            try:
                self._encode_all(batches)
            finally:
                self._put(None)
                thread.join()
                publisher.shutdown()
                for writer in self.writers.values():
                    writer.abandon()
                self.writers.clear()
        except Exception:
            # The writer's error comes first: after the death of a worker the job would go on without a writer.
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def _encode_all(self, batches: Iterable[DecodedBatch]) -> None:
        before: EncodedBatch | None = None
        source = iter(batches)
        while (batch := self._next(source, before)) is not None:
            current = EncodedBatch(batch, None)
            if batch.images:
                if self.texts is not None:
                    self.full_captions += int((batch.tokens[:, self._last] != self._padding).sum())
                current.encodings = encode(batch.pixels, batch.tokens, self.images, self.texts).to_cpu()
            # The device works on the new batch while the previous one is checked and written.
            if before is not None:
                self._hand_over(before)
            before = current
        if before is not None:
            self._hand_over(before)

    def _next(self, source: Iterator[DecodedBatch], before: EncodedBatch | None) -> DecodedBatch | None:
        started = time.monotonic()
        batch = next(source, None)
        busy = before is not None and before.encodings is not None and before.encodings.in_flight
        if not busy:
            self.waited += time.monotonic() - started
        return batch

    def _hand_over(self, result: EncodedBatch) -> None:
        if result.encodings is not None:
            result.encodings.wait()
            self._encode_again(result, result.encodings.not_finite(len(result.batch.images)))
        self._put(result)

    def _encode_again(self, result: EncodedBatch, rows: list[int]) -> None:
        """Encodes rows with values that are not finite again, in fp32. Rejects those that still are not finite."""
        batch = result.batch
        for row in rows:
            fresh = encode_exactly(row, batch.pixels, batch.tokens, self.images, self.texts)
            if fresh.image_ok[0] and fresh.text_ok[0]:
                result.reencoded.add(row)
                result.encodings.replace(row, fresh)
            else:
                result.rejected[row] = NONFINITE_TEXT if fresh.image_ok[0] else NONFINITE_LATENT

    def _put(self, result: EncodedBatch | None) -> None:
        # A writer thread that has died empties the queue no more: notice it instead of waiting forever.
        while self._error is None:
            try:
                return self._results.put(result, timeout=0.5)
            except queue.Full:
                continue
        if result is not None:
            raise self._error

    # --- in the writer thread ---------------------------------------------------------------------------------

    def _write_all(self, publisher: ThreadPoolExecutor) -> None:
        publications: deque[Future] = deque()
        try:
            while (result := self._results.get()) is not None:
                self._write(result)
                for shard in [shard for shard, writer in self.writers.items() if writer.complete]:
                    try:
                        done = self.writers[shard].finish()  # where that fails, `run` removes what it has written
                    except FolderGone:
                        self._leave(shard)
                        continue
                    del self.writers[shard]
                    publications.append(publisher.submit(self._publish, shard, done))
                self._await(publications, WAITING)
            self._await(publications, 0)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _await(self, publications: deque[Future], most: int) -> None:
        """Waits until at most so many publications are left."""
        while publications and (len(publications) > most or publications[0].done()):
            publications.popleft().result()

    def _write(self, result: EncodedBatch) -> None:
        batch = result.batch
        positions = [image.position for image in batch.images] + [position for position, _ in batch.rejected]
        self.keep({position.shard for position in positions})
        for position, rejected in batch.rejected:
            self._add(position.shard, position.number, rejected)
        for image, sample in zip(batch.images, self._samples(result), strict=True):
            self._add(image.position.shard, image.position.number, sample)
        for end in batch.ends:
            if self._is_written(end.shard):
                writer = self._writer(end.shard)
                try:
                    writer.end(end.samples, end.parts)
                except ValueError as error:
                    self.fail(end.shard, Problem(str(error)))
        for shard, problem in batch.failures:
            self.fail(shard, problem)
        rejected = len(batch.rejected) + len(result.rejected)
        self.progress.update(len(batch.images) - len(result.rejected), rejected)

    def fail(self, shard: InputShard, problem: Problem) -> None:
        """Gives a shard up. The next start of the job tries it again."""
        if self._is_written(shard):
            self.failed[shard] = problem
            every_rank.warning(f"encode: {shard.shard} could not be read: {problem}")  # the job may end days later
            self.give_up(shard, problem)
        if shard in self.writers:
            self.writers.pop(shard).abandon()

    def _writer(self, shard: InputShard) -> ShardWriter:
        if shard not in self.writers:
            self.writers[shard] = self.open_writer(shard)
        return self.writers[shard]

    def _add(self, shard: InputShard, number: int, sample: EncodedSample | Rejected) -> None:
        if self._is_written(shard):
            try:
                self._writer(shard).add(number, sample)
            except FolderGone:
                self._leave(shard)

    def _is_written(self, shard: InputShard) -> bool:
        """Whether what comes of a shard is still to be written."""
        return shard not in self.failed and shard not in self.finished

    def _leave(self, shard: InputShard) -> None:
        """Leaves a shard to the rank that has finished it, and that took this one for lost. Raises as `publish`."""
        self.writers.pop(shard).abandon()
        self.publish(shard)
        self.finished.add(shard)

    def _samples(self, result: EncodedBatch) -> Iterator[EncodedSample | Rejected]:
        """What becomes of each image of a batch, in order."""
        if result.encodings is None:
            return
        stored = result.encodings.images
        # Of the whole batch: PyTorch takes longer for a row of a tensor than NumPy for a row of an array.
        arrays = {
            f"{name}_{resolution}": array.numpy().astype(self.images.dtype, copy=False)
            for resolution, kept in stored.items()
            for name, array in kept.arrays.items()
        }
        if result.encodings.text is not None:
            arrays["text"] = result.encodings.text.numpy()
        sums = {resolution: kept.sums.numpy() for resolution, kept in stored.items() if kept.sums is not None}
        for row, image in enumerate(result.batch.images):
            if row in result.rejected:
                yield Rejected(image.key, result.rejected[row], "also in fp32")
                continue
            columns: dict[str, Any] = {
                "key": image.key,
                "caption": image.caption,
                "width": image.width,
                "height": image.height,
                **{name: array[row] for name, array in arrays.items()},
            }
            for resolution in stored:
                columns[f"crop_{resolution}"] = crop_column(self.images.kind, image.boxes[resolution])
            yield EncodedSample(
                columns,
                {resolution: values[row] for resolution, values in sums.items()},
                tuple(resolution for resolution in stored if image.short_side < resolution),
                row in result.reencoded,
            )

    # --- in the publisher thread ------------------------------------------------------------------------------

    def _publish(self, shard: InputShard, done: dict[str, Any]) -> None:
        self.publish(shard)
        self.finished.add(shard)
        self.progress.shard_done(done["samples"] + sum(done["rejected"].values()))
