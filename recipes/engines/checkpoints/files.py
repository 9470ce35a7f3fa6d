"""Checkpoints as files and folders of either engine: each appears whole or not at all, and old ones are removed.

A checkpoint is written under a hidden name, brought to the disk, and renamed; only then `latest`, a link, points to it.
So a process that is killed at any moment leaves the checkpoints that there were, and nothing that the next start trips
over.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from data.system.disk_errors import ADVICE, disk_error, may_pass
from data.system.errors import Outage
from data.system.files import move, point_to, to_disk
from data.system.log import log
from recipes.engines.checkpoints.copies import CheckpointCopies
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.record import keep_with, record_with
from recipes.training import stop
from recipes.training.checkpoint_names import Kind, batch_of
from recipes.training.finite import is_worth_keeping
from recipes.training.ranks import by_first_rank, wait
from recipes.training.run import Run

PARTIAL = ".partial."  # before a name, whose suffix Composer looks at
OLD = f"{PARTIAL}old."  # before the name of a folder whose successor gets it next


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path for a checkpoint, a file or a folder, which gets its name when the block ends without an error.

    Every rank must enter and leave it. The first rank renames when all ranks have written; the others wait for it, in
    no collective, as a slow disk may take longer than a collective may. What the first rank alone writes inside, it
    writes by `first_rank_writes`.

    Raises:
        ValueError: a rank cannot write there, for instance because the disk is full.
    """
    partial = path.with_name(PARTIAL + path.name)

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)

    def finish() -> None:
        to_disk(partial)
        _replace(path, partial)

    first_rank_writes(path, begin)
    with _says_what_to_do(path):
        yield partial
    wait()  # all ranks have written
    first_rank_writes(path, finish)


def first_rank_writes(path: Path, write: Callable[[], object]) -> None:
    """Call a function that writes a part of a checkpoint on the first rank, while the others wait, however long it
    takes. Every rank must call it, inside of `whole`.

    Args:
        path: that `whole` was given.
        write: called on the first rank only.

    Raises:
        ValueError: on all ranks: it cannot write there.
    """

    def act() -> None:
        with _says_what_to_do(path):
            write()

    by_first_rank(act)


@contextmanager
def _says_what_to_do(path: Path) -> Iterator[None]:
    """A context for writing a part of a checkpoint, which is removed if the disk refuses it.

    Raises:
        ValueError: the disk refuses it; what to do. An `Outage` where a mount does not answer.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        found = disk_error(error)
        if found is None:
            raise
        remove(path.with_name(PARTIAL + path.name))
        raise (Outage if may_pass(found) else ValueError)(
            f"checkpoints: {path} could not be written ({found.strerror}); {ADVICE[found.errno]} and start again, it "
            "goes on from the checkpoint before"
        ) from error


def _replace(path: Path, partial: Path) -> None:
    aside = path.with_name(OLD + path.name)
    if path.is_dir():  # a folder cannot be replaced in one step
        move(path, aside)
    move(partial, path)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder that may be there."""
    with suppress(OSError):  # of a read-only disk, on which nothing was written either
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class CheckpointFiles:
    """The checkpoints of a run's folder."""

    def __init__(
        self, folder: Path, kind: Kind, keep: int, bucket: str | None = None, loggers: RunLoggers | None = None
    ) -> None:
        """
        Args:
            folder: of the checkpoints.
            kind: of which engine they are.
            keep: number of checkpoints that are kept; -1: all.
            bucket: address of copies, `checkpoints.bucket`.
            loggers: of the run; None: it logs nothing.
        """
        self.folder = folder
        self.kind = kind
        self.link = folder / kind.link
        self.keep = keep
        self._copies = None if bucket is None else CheckpointCopies(bucket)
        self._holds = False  # whether copies begin by `copy_held`
        self._loggers = loggers

    def newest_is(self, path: Path, batch: int) -> None:
        """The link points to a new checkpoint, its copy to the bucket begins, and all before it but the newest `keep`
        are removed.

        Those of later batches, which an earlier run with the same folder left, stay. Every rank must call it: the first
        one does it, and the others wait here, as the copy of the checkpoint before may take longer than a collective.
        """
        by_first_rank(lambda: self._newest_is(path, batch))

    def hold_copies(self) -> None:
        """Let copies begin by `copy_held`: the next checkpoint may be written a second time."""
        self._holds = True

    def copy_held(self) -> None:
        """Begin the copy of the newest checkpoint, which was held. Every rank must call it, as above."""
        self._holds = False
        if self._copies is not None:
            by_first_rank(lambda: self._copies.begin(self.kind.newest(self.folder), self.link.name, self.keep))

    def catch_up(self) -> None:
        """Begin the copy of the newest checkpoint, of a run that goes on from it, where the bucket has an older one.

        Every rank must call it.

        Raises:
            ValueError: the bucket cannot be read.
        """
        if self._copies is not None:
            by_first_rank(lambda: self._copies.catch_up(self.kind.newest(self.folder), self.link.name, self.keep))

    def flush(self) -> None:
        """Write what the loggers' files lack, of the batch of the newest checkpoint."""
        if self._loggers is not None:
            self._loggers.flush()

    def wait(self) -> None:
        """Wait until the last checkpoint is in the bucket, or could not be copied. Every rank must call it."""
        if self._copies is not None:
            by_first_rank(self._copies.wait)

    def finish(self) -> None:
        """Wait until the last checkpoint is in the bucket. Every rank must call it.

        Raises:
            ValueError: it could not be copied.
        """
        if self._copies is not None:
            by_first_rank(self._copies.finish)

    def _newest_is(self, path: Path, batch: int) -> None:
        if self._loggers is not None:
            self._loggers.flush()  # first: a run that goes on from here does not log these batches again
        keep_with(self.folder.parent, path)  # before the link: what it points to has its record
        point_to(self.link, path)
        if self._copies is not None and self._holds:
            self._copies.wait()  # it may read one that is removed below
        elif self._copies is not None:
            self._copies.begin(path, self.link.name, self.keep)
        if self.keep != -1:
            mine = [old for old in self.kind.all(self.folder) if batch_of(old.name) <= batch]
            for old in mine[: -self.keep]:
                # The next start removes what a kill in the middle leaves under this name.
                partial = old.with_name(PARTIAL + old.name)
                move(old, partial)
                remove(record_with(self.folder.parent, old))  # first, as the rest may take long
                remove(partial)


def end_if_asked(run: Run, save: Callable[[], None] | None) -> None:
    """At the end of a batch: if a rank got a signal, save a checkpoint and end the process. Every rank must call it.

    Args:
        run: says whether it is to stop.
        save: saves a checkpoint now, unless there is one of this batch or it is not finite; None: the recipe saves
            none.

    Raises:
        StartAgain: the run ends here. Not in the last batch, after which it ends anyway.
    """
    if not run.stopping or run.clock.ended or run.clock.ends_with_epoch:
        return
    if save is not None:
        save()
    if save is None:
        kept = "checkpoints.save is false"
    elif is_worth_keeping(run):
        kept = "start the same command again, and it goes on from there"
    else:
        kept = "it is not finite and was not saved; the same command goes on from the checkpoint before it, or begins"
    log.info(f"{stop.caught()}: stopped after batch {run.clock.batch}; {kept}")
    raise stop.StartAgain
