"""One run at a time writes into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from data.system.locks import held

LOCK = ".lock"
# Seconds. A launcher may be gone while its ranks save a large checkpoint; a loop has started the run again by then.
PATIENCE = 300.0


@contextmanager
def only_run(output: str) -> Iterator[None]:
    """A context in which no other run writes into this folder.

    The first rank waits up to `PATIENCE` seconds for a run that does; the other ranks wait for the first one when they
    join it.

    Raises:
        ValueError: another run goes on writing, or nothing can be written there.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    busy = f"output: another run trains in {output} ({{holder}}); wait for its end, or give another `output`"
    with ExitStack() as stack:
        try:
            stack.enter_context(held(Path(output, LOCK), busy, PATIENCE))
        except OSError as error:
            raise ValueError(f"output: cannot write into {output} ({error.strerror}); give another folder") from error
        yield


@contextmanager
def no_run_beside(checkpoint: Path) -> Iterator[None]:
    """A context in which no run writes into the folder that a checkpoint is in. It may also be one of no run.

    Raises:
        ValueError: a run trains there.
    """
    folder = checkpoint.absolute().parent
    lock = folder.parent / LOCK
    busy = f"{folder}: a run trains there ({{holder}}); wait for its end, or copy the checkpoint to another folder"
    with held(lock, busy) if folder.name == "checkpoints" and lock.is_file() else nullcontext():
        yield
