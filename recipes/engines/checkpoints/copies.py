"""Copies of checkpoints in a bucket, made while the run trains."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.system.errors import Outage, one_line
from data.system.helper_process import HelperProcess
from data.system.log import log
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.record import RECORD, record_with
from recipes.training.checkpoint_names import batch_of

SCRIPT = Path(__file__).with_name("copy_process.py")

_begun: set[CheckpointCopies] = set()  # that have begun a copy, and have not finished


@contextmanager
def copies_end() -> Iterator[None]:
    """A context that an error leaves only when the copy that goes on has ended. Another run may begin then.

    Python would wait for the copy, too, when it ends, but without a word and when the folder is no longer locked.
    """
    try:
        yield
    except BaseException as error:
        for copies in _begun:
            copies.end(error)
        _begun.clear()
        raise


class CheckpointCopies:
    """Copies checkpoints one after the other, by a process of its own. Only the first rank uses it.

    A copy that fails costs a warning and not the run: the checkpoint is on the disk, and the next one is copied again.
    Only at the end of the run, which has no next one, it is an error.
    """

    def __init__(self, address: str) -> None:
        """
        Args:
            address: `checkpoints.bucket`.
        """
        self.bucket = Bucket(address)
        self._process = HelperProcess(SCRIPT)
        self._thread = ThreadPoolExecutor(1, "checkpoint-copies")  # waits for the process
        self._copy: Future[ValueError | None] | None = None  # the last one: what went wrong
        self._name = ""
        self._is_last = self._said = False  # no copy follows; a line has said that the last one failed

    def begin(self, path: Path, link: str, keep: int) -> None:
        """Begin the copy of a checkpoint with its record, after the one before has ended.

        Args: as of `Bucket.push`.
        """
        if self._copy is not None and not self._copy.done():
            log.info(f"checkpoints: {path.name} is to be copied, and waits until {self._name} is")
        self.wait()
        folder = path.parent.parent
        record = record_with(folder, path, folder)
        task = {
            "address": self.bucket.address,
            "path": str(path.absolute()),
            "link": link,
            "keep": keep,
            "record": {name: (record / name).read_text("utf-8") for name in RECORD if (record / name).is_file()},
        }
        self._name, self._is_last, self._said = path.name, False, False
        with suppress(ValueError):  # which `do` raises again
            self._process.start()
        self._copy = self._thread.submit(self._do, task)
        _begun.add(self)

    def catch_up(self, newest: Path | None, link: str, keep: int) -> None:
        """Begin the copy of the newest checkpoint on the disk if that of the bucket is older, or there is none.

        Args: as of `Bucket.push`; `newest` is None where there is no checkpoint.

        Raises:
            ValueError: the store refuses an answer, or does not answer.
        """
        if newest is None:
            return
        latest = self.bucket.latest()
        if latest is None or batch_of(latest["checkpoint"]) < batch_of(newest.name):
            self.begin(newest, link, keep)

    def wait(self) -> ValueError | None:
        """Wait for the last copy. Returns what went wrong; None: nothing."""
        return None if self._copy is None else self._copy.result()

    def finish(self) -> None:
        """Wait for the last copy, and end the process.

        Raises:
            ValueError: it has failed, with an `Outage` where the store does not answer.
        """
        self._is_last = True
        error = self.wait()
        self._process.end()
        _begun.discard(self)
        if error is not None:
            why = "as said above" if self._said else error
            kind = Outage if isinstance(error, Outage) else ValueError
            raise kind(
                f"checkpoints.bucket: {self._name} could not be copied ({why}); start the same command again, which "
                "copies it"
            )

    def end(self, why: BaseException) -> None:
        """Wait for the last copy, whatever becomes of it, and end the process.

        Args:
            why: the error that ends the run. It is printed if there is something to wait for, unless it has been.
        """
        if not self._copy.done():
            reason = "" if isinstance(why, SystemExit) else f"{one_line(why)}; "
            log.info(f"checkpoints: {reason}the run ends when {self._name} is copied")
        self.wait()
        self._process.end()

    def _do(self, task: dict[str, Any]) -> ValueError | None:
        try:
            self._process.do(task)
        except ValueError as error:
            if not self._is_last:
                self._said = True
                log.warning(
                    f"checkpoints.bucket: {error}; the checkpoint stays on the disk, and the next one is copied again"
                )
            return error
        return None
