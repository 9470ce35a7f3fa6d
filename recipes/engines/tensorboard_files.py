"""TensorBoard files on a disk that may be full for a while: training goes on, as where MLflow's server fails."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.disk_errors import ADVICE, disk_error
from data.log import log

if TYPE_CHECKING:  # the import takes seconds
    from torch.utils.tensorboard import SummaryWriter

SAID = 60.0  # seconds between lines about it


def outlasts_full_disk(writer: SummaryWriter) -> None:
    """What the disk does not take from now on is left out of the file, and the run does not end.

    TensorBoard writes in a thread. An error there ends it, and with it the run, at the next figure.
    """
    records = writer.file_writer.event_writer._async_writer._writer
    records._writer = LastingFile(records._writer)


class LastingFile:
    """A file to which TensorBoard appends records, each whole or not at all."""

    def __init__(self, file: Any) -> None:
        """
        Args:
            file: TensorBoard's, which opens it for each record, so that it needs no repair.
        """
        self._file = file
        self._path = Path(os.fsdecode(file.filename))
        self._said = -SAID

    def write(self, record: bytes) -> None:
        """Append a record, unless the disk is full, read-only or the like."""
        size = 0
        try:
            size = self._path.stat().st_size
            self._file.write(record)
        except OSError as error:
            if error.filename is None:
                error.filename = str(self._path)
            if disk_error(error) is None:
                raise
            with suppress(OSError):  # readers stop at half a record, whatever follows
                os.truncate(self._path, size)
            if time.monotonic() - self._said >= SAID:
                self._said = time.monotonic()
                advice = f"{error.strerror}; {ADVICE[error.errno]}"
                log.warning(f"loggers: {self._path}: {advice}; training goes on, and figures are missing there")

    def flush(self) -> None:
        """Nothing waits: records are written one by one."""

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._file.closed
