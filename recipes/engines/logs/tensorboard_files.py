"""TensorBoard files on a disk that may be full for a while: training goes on, as where MLflow's server fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import yaml

from data.system.disk_errors import ADVICE
from data.system.log import log

SAID = 60.0  # seconds between lines about it
MOST = 2**20  # bytes that wait for a flush


class TensorBoardWriter:
    """Writes figures, images and settings to one file per start of a run.

    What a full or lost disk does not take is left out of the file, and the run does not end.
    """

    def __init__(self, folder: Path, flush_every: int) -> None:
        """
        Args:
            folder: of the files.
            flush_every: batches between writes to disk.
        """
        from torch.utils.tensorboard import SummaryWriter  # it takes seconds

        self._writer = SummaryWriter(str(folder))
        self._flush_every = flush_every
        self._flushed_at = 0
        # TensorBoard writes in a thread. An error there ends it, and with it the run, at the next figure.
        records = self._writer.file_writer.event_writer._async_writer._writer
        records._writer = LastingFile(records._writer)

    def figures(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures of a batch."""
        for name, value in figures.items():
            self._writer.add_scalar(name, float(value), step)
        if step >= self._flushed_at + self._flush_every:
            self.flush()
            self._flushed_at = step

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 of a batch."""
        self._writer.add_images(name, images, step, dataformats="NHWC")

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings as texts, nested ones as YAML."""
        for name, value in settings.items():
            text = str(value)
            if isinstance(value, Mapping):
                with suppress(yaml.YAMLError):  # of values that YAML has no form of, such as a path
                    text = indent(yaml.safe_dump(value, sort_keys=False), 4 * " ")  # Markdown's code
            self._writer.add_text(name, text)

    def flush(self) -> None:
        """Write what waits to the file."""
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the file, whatever the status of the run."""
        self._writer.close()


class LastingFile:
    """A file to which TensorBoard appends records: those between two flushes in one write, or not at all.

    TensorBoard opens and closes the file for each write, which on a network file system takes milliseconds, and a batch
    has some twenty records.
    """

    def __init__(self, file: Any) -> None:
        """
        Args:
            file: TensorBoard's, which opens it for each write, so that it needs no repair.
        """
        self._file = file
        self._path = Path(os.fsdecode(file.filename))
        self._said = -SAID
        self._waiting = bytearray()
        self._lock = threading.Lock()  # TensorBoard's thread writes and flushes, and the main thread flushes

    def write(self, record: bytes) -> None:
        """Take a record, which the next flush appends."""
        with self._lock:
            self._waiting += record
            full = len(self._waiting) > MOST
        if full:
            self.flush()

    def flush(self) -> None:
        """Append what waits, unless the disk is full, is lost or the like."""
        with self._lock:
            records, self._waiting = bytes(self._waiting), bytearray()
            if records:
                self._append(records)

    def _append(self, records: bytes) -> None:
        size = None
        try:
            size = self._path.stat().st_size
            self._file.write(records)
        except OSError as error:
            if size is not None:  # a mount may be back by now that was lost before, with all that is in the file
                with suppress(OSError):  # readers stop at half a record, whatever follows
                    os.truncate(self._path, size)
            if time.monotonic() - self._said >= SAID:
                self._said = time.monotonic()
                advice = f"{error.strerror}; {ADVICE.get(error.errno, 'look at the disk and its mount')}"
                log.warning(f"loggers: {self._path}: {advice}; training goes on, and figures are missing there")

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._file.close()
