"""Marks at the ends of the files of a sharded checkpoint: the batch that each one is of.

Parts of two checkpoints of a run have the same sizes and places, so that nothing else tells them apart. PyTorch reads
parts by their places, and nothing after the last one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint

MARK = re.compile(rb"ba\d{14}")
LENGTH = 16


class MarkedFiles(dcp.FileSystemWriter):
    """Writes a sharded checkpoint whose files end with a mark."""

    def __init__(self, folder: Path, batch: int) -> None:
        """
        Args:
            folder: to write.
            batch: of the checkpoint.
        """
        super().__init__(folder)
        self._mark = f"ba{batch:0{LENGTH - 2}}".encode()

    def write_data(self, *arguments: Any) -> Any:
        """See `FileSystemWriter`: errors reach all ranks from here."""
        written = super().write_data(*arguments)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            with open(Path(self.path, name), "ab") as file:
                file.write(self._mark)
                file.flush()
                os.fsync(file.fileno())
        return written


def check_one_batch(folder: Path, metadata: Any) -> None:
    """Compare the marks of a checkpoint's files. Those of earlier versions have none. What is missing, is said where it
    is read. Where a run goes on, the first rank looks for all.

    Args:
        folder: of the checkpoint.
        metadata: what its file `.metadata` holds.

    Raises:
        DamagedCheckpoint: two files are of different batches.
    """
    marks: dict[int | None, str] = {}
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if (folder / name).is_file():
            marks.setdefault(_batch_of(folder / name), name)
    if len(marks) > 1:
        listed = " and ".join(f"{name} is {_words(batch)}" for batch, name in [*marks.items()][:2])
        raise DamagedCheckpoint(f"{folder}: files of two checkpoints are mixed: {listed}; copy the whole folder again")


def _batch_of(file: Path) -> int | None:
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - LENGTH))
        found = stream.read()
    return int(found[2:]) if MARK.fullmatch(found) else None


def _words(batch: int | None) -> str:
    return "of no batch (of an earlier version, or not whole)" if batch is None else f"of batch {batch}"
