"""The folder of one input shard while it is written: MDS files, rejected.jsonl and done.json."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.encoded.manifest import REJECTED
from data.sources.base import Rejected, rejected_line
from data.system.disk_errors import about
from data.system.files import make_empty
from precompute.output.folder_gone import FolderGone
from precompute.output.mds_files import MDSFiles
from precompute.output.output_set import DONE


@dataclass(frozen=True)
class Storage:
    """How MDS files are stored (see `precompute.config.EncodeConfig`)."""

    size_limit: str = "64mb"
    compression: str | None = None
    hashes: tuple[str, ...] = ()


class ShardFolder:
    """Call `close` after the last row, or `abandon` to give the shard up. Errors of the disk name the folder.

    `write` and `close` raise a `FolderGone` where another process has removed it.

    Args:
        folder: where to write; emptied first.
        shard: the input shard's id.
        columns: MDS encoding of each column.
        storage: how rows are stored.
        options: what the values depend on; kept in done.json (see `precompute.output.output_set.OutputSet.claim`).

    Attributes:
        rows: number of rows that were written.
    """

    def __init__(
        self, folder: Path, shard: str, columns: dict[str, str], storage: Storage, options: dict[str, Any]
    ) -> None:
        make_empty(folder)
        self.folder = folder
        self.shard = shard
        self.options = options
        self.rows = 0
        self._rejected: Counter[str] = Counter()
        self._rejected_lines: list[str] = []
        self._mds = MDSFiles(
            out=str(folder),
            columns=columns,
            compression=storage.compression,
            hashes=list(storage.hashes),
            size_limit=storage.size_limit,
        )

    def write(self, row: dict[str, Any]) -> None:
        """Write a row: a value per column."""
        with self._writing():
            self._mds.write(row)
        self.rows += 1

    def reject(self, rejected: Rejected) -> None:
        """Note a sample that is not stored."""
        self._rejected[rejected.reason] += 1
        self._rejected_lines.append(rejected_line(self.shard, rejected) + "\n")

    def close(self, **facts: Any) -> dict[str, Any]:
        """Close the files, write done.json and return its content.

        Args:
            facts: what else it says, as JSON-compatible values.
        """
        with self._writing():
            self._mds.finish()
            (self.folder / REJECTED).write_text("".join(self._rejected_lines), encoding="utf-8")
            done = {
                "shard": self.shard,
                "samples": self.rows,
                "rejected": dict(self._rejected),
                "bytes": sum(path.stat().st_size for path in self.folder.glob("shard.*")),
                **facts,
                "options": self.options,
            }
            (self.folder / DONE).write_text(json.dumps(done, indent=1), encoding="utf-8")
        return done

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with about(self.folder):
                yield
        except FileNotFoundError:
            raise FolderGone(self.folder) from None

    def abandon(self) -> None:
        """Remove what was written."""
        self._mds.cancel_future_jobs()
        shutil.rmtree(self.folder, ignore_errors=True)
