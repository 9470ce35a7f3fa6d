"""Checkpoints as files and folders of either engine: each appears whole or not at all, and old ones are removed.

A checkpoint is written under a hidden name, brought to the disk, and renamed; only then `latest`, a link, points to it.
So a process that is killed at any moment leaves the checkpoints that there were, and nothing that the next start trips
over.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from data.disk_errors import ADVICE, disk_error
from data.files import point_to, to_disk
from data.log import log
from recipes.engines.bucket import Bucket
from recipes.training import stop
from recipes.training.ranks import is_first_rank, wait
from recipes.training.run import Run

PARTIAL = ".partial."  # before a name, whose suffix Composer looks at
OLD = f"{PARTIAL}old."  # before the name of a folder whose successor gets it next
Pattern = re.Pattern[str]  # of the names of checkpoints; its first group is the batch


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path for a checkpoint, a file or a folder, which gets its name when the block ends without an error.

    Every rank must enter and leave it. The first rank renames when all ranks have written; the others wait for it.

    Raises:
        ValueError: a rank cannot write there, for instance because the disk is full.
    """
    partial = path.with_name(PARTIAL + path.name)
    try:
        if is_first_rank():
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove(partial)
        wait()
        yield partial
        wait()
        if is_first_rank():
            to_disk(partial)
            _replace(path, partial)
    except (Exception, CheckpointException) as error:
        found = disk_error(error)
        if found is None:
            raise
        _remove(partial)
        raise ValueError(
            f"checkpoints: {path} could not be written ({found.strerror}); {ADVICE[found.errno]} and start again, it "
            "goes on from the checkpoint before"
        ) from error
    wait()


def _replace(path: Path, partial: Path) -> None:
    aside = path.with_name(OLD + path.name)
    if path.is_dir():  # a folder cannot be replaced in one step
        path.rename(aside)
    partial.replace(path)
    _remove(aside)


def _remove(path: Path) -> None:
    with suppress(OSError):  # of a read-only disk, on which nothing was written either
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class CheckpointFiles:
    """The checkpoints of a run's folder."""

    def __init__(self, folder: Path, link: str, pattern: Pattern, keep: int, bucket: str | None = None) -> None:
        """
        Args:
            folder: of the checkpoints.
            link: name of the link to the newest one.
            pattern: of their names; the first group is the batch.
            keep: number of checkpoints that are kept; -1: all.
            bucket: address of copies, `checkpoints.bucket`.
        """
        self.folder = folder
        self.link = folder / link
        self.pattern = pattern
        self.keep = keep
        self.bucket = None if bucket is None else Bucket(bucket)

    def mend(self) -> None:
        """Remove what a killed process left. If the link is lost, it points to the newest checkpoint again.

        Only the first rank calls this.
        """
        for old in self.folder.glob(f"{OLD}*"):
            if not (path := old.with_name(old.name.removeprefix(OLD))).exists():
                old.rename(path)
        for path in self.folder.glob(f"{PARTIAL}*"):
            _remove(path)
        if not self.link.exists() and (found := self.up_to(None)):
            point_to(self.link, found[-1])

    def up_to(self, batch: int | None) -> list[Path]:
        """Checkpoints of batches up to this one, oldest first; None: all."""
        found = {}
        for path in self.folder.glob("ep*-ba*"):
            match = self.pattern.fullmatch(path.name)
            if match and (batch is None or int(match[1]) <= batch):
                found[path] = int(match[1])
        return sorted(found, key=found.get)

    def newest_is(self, path: Path, batch: int) -> None:
        """The link points to a new checkpoint, and all before it but the newest `keep` are removed.

        Those of later batches, which an earlier run with the same folder left, stay. Only the first rank calls this.

        Raises:
            ValueError: it cannot be copied to the bucket.
        """
        point_to(self.link, path)
        if self.bucket is not None:
            self.bucket.push(path, self.link.name, self.keep)
        if self.keep != -1:
            for old in self.up_to(batch)[: -self.keep]:
                _remove(old)


def end_if_asked(run: Run, save: Callable[[], None] | None) -> None:
    """At the end of a batch: if a rank got a signal, save a checkpoint and end the process. Every rank must call it.

    Args:
        run: says whether it is to stop.
        save: saves a checkpoint now, unless there is one of this batch; None: the recipe saves none.

    Raises:
        StartAgain: the run ends here. Not in the last batch, after which it ends anyway.
    """
    if not run.stopping or run.clock.ended:
        return
    if save is not None:
        save()
    kept = "checkpoints.save is false" if save is None else "start the same command again, and it goes on from there"
    log.info(f"{stop.caught()}: stopped after batch {run.clock.batch}; {kept}")
    raise stop.StartAgain
