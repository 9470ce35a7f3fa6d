"""Reads all files of an encoded set in several processes, for `precompute/verify.py`."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.mds_index import INDEX, Shard
from data.system.files import read_if_object, write_json
from data.system.helper_process import end_with_parent
from data.system.interrupts import interrupts_after_forks
from data.system.log import log
from precompute.checking.file_figures import TEXTS, Column, ColumnFigures, FileFigures, file_figures

AHEAD = 4  # files per process that are given out before their figures are taken
LINES = 60.0  # seconds between lines of progress, each of which keeps what was found so far


def figures_of_files(
    folder: Path,
    entries: list[Shard],
    columns: Mapping[str, Column],
    workers: int = 0,
    progress: Path | None = None,
    texts: Sequence[str] = TEXTS,
    manifest: str = MANIFEST,
) -> FileFigures:
    """The figures of all files of a set, added in the order of the index.

    Args:
        folder: of the set.
        entries: its index.
        columns: see `array_columns`.
        workers: number of processes; 0 reads in this one.
        progress: file in which the figures so far are kept, so that a call after an interruption goes on behind them.
            Nothing is kept of a set with faults, whose files may be mended meanwhile. The caller removes the file.
            None: start with the first file.
        texts: names of the text columns.
        manifest: name of the set's manifest.

    Raises:
        ValueError: a process died.
    """
    total, begin, identity, whole = FileFigures(), 0, "", True
    if progress is not None:
        identity = hashlib.sha256(Path(folder, INDEX).read_bytes() + Path(folder, manifest).read_bytes()).hexdigest()
        total, begin = _kept(progress, identity)
        if begin:
            log.info(f"verify: goes on behind {begin:,} of {len(entries):,} files; to read all, delete {progress}")
    end, kept = begin, time.monotonic()

    def keep() -> None:
        if progress is not None and whole and not total.faults and end > begin:
            _keep(progress, identity, end, total)

    try:
        for one in _in_order(partial(file_figures, folder, columns=columns, texts=texts), entries[begin:], workers):
            whole = False  # an interrupt may come here, too
            total.add(one)
            end += 1
            whole = True
            if time.monotonic() - kept >= LINES:
                log.info(f"verify: {end:,} of {len(entries):,} files, {len(total.faults):,} faults")
                keep()
                kept = time.monotonic()
    finally:  # also at the end: what follows can be interrupted, too
        keep()
    return total


def _in_order(look: Callable[[Shard], FileFigures], entries: list[Shard], workers: int) -> Iterator[FileFigures]:
    """The figures of each file, in order, by several processes."""
    workers = min(workers, len(entries))
    if workers < 2:
        yield from map(look, entries)
        return
    # Forked, because each would else import for seconds. They use neither a GPU nor PyTorch's threads.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin)
    given: deque[Future[FileFigures]] = deque()
    try:
        for entry in entries:
            with interrupts_after_forks():  # the first call forks
                given.append(pool.submit(look, entry))
            if len(given) > AHEAD * workers:
                yield given.popleft().result()
        while given:
            yield given.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            "a process that reads files died; it may have run out of memory: give fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a process that reads: Ctrl-C is the parent's, and when it is killed this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def _keep(progress: Path, identity: str, files: int, total: FileFigures) -> None:
    columns = {name: vars(column) | {"seen": sorted(column.seen)} for name, column in total.columns.items()}
    figures = {"samples": total.samples, "hashes": total.hashes, "columns": columns}
    write_json(progress, {"set": identity, "files": files, "figures": figures})


def _kept(progress: Path, identity: str) -> tuple[FileFigures, int]:
    """The figures that were kept of a set, and of how many files they are: of none where the file is another set's,
    or has other figures."""
    values = read_if_object(progress)
    if values.get("set") != identity:
        return FileFigures(), 0
    try:
        figures = values["figures"]
        found = FileFigures(figures["samples"], figures["hashes"])
        for name, column in figures["columns"].items():
            found.columns[name] = ColumnFigures(**column | {"seen": set(column["seen"])})
        return found, values["files"]
    except (KeyError, TypeError):  # another version of this file wrote it
        return FileFigures(), 0
