"""Blocks in /dev/shm that killed processes have left, and how they are told from those of runs that live.

The blocks of a data set begin with its number (see `data.encoded.shared_names`). A process that uses a number
holds a lock of the file `precompose-<number>` beside the blocks. The kernel releases it when the process and all that
were forked from it have ended, and it shows in other containers that have the same /dev/shm, where the process itself
does not.
Blocks without such a file, of other programs, are taken for stale if no process has them open.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
YOUNG = 60.0  # seconds within which a process may have made a block and not opened it yet
# streaming's blocks, and those that PyTorch names after a process.
OTHERS = re.compile(r"\d{6,}_[a-z_]+|torch_\d+_\d+_\d+")
FIRST_NAMESPACE = "pid:[4026531836]"  # of processes, outside of all containers

_held: dict[int, int] = {}  # number -> file descriptor, of this process


def hold(number: int, folder: Path = MEMORY) -> None:
    """Mark a number as used until this process and those that it forks have ended."""
    if not folder.is_dir():
        return
    path = _lock(number, folder)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                break
        os.close(file)  # another process has just removed it
    _held[number] = file
    atexit.register(_release, number, path, os.getpid())


def _release(number: int, path: Path, owner: int) -> None:
    if os.getpid() != owner or number not in _held:  # a process that was forked has a copy
        return
    file = _held.pop(number)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where another rank uses it
        _remove_locks(number)
        path.unlink()
    os.close(file)


def left_behind(folder: Path = MEMORY) -> list[Path]:
    """Blocks of data sets whose processes have all ended."""
    return [block for number, _ in _free(folder) for block in _blocks(number, folder)]


def clear(folder: Path = MEMORY) -> list[Path]:
    """Remove what `left_behind` lists; returns it. Runs that live are not touched, whatever container they are in."""
    removed = []
    for number, path in _free(folder):
        with _locked(path) as free:
            if not free:  # taken in between
                continue
            for block in _blocks(number, folder):
                with suppress(FileNotFoundError):
                    block.unlink()
                    removed.append(block)
            _remove_locks(number)
            path.unlink(missing_ok=True)
    return removed


def of_others(folder: Path = MEMORY) -> list[Path]:
    """This user's blocks of streaming and PyTorch that have no lock, and that no process here has open."""
    found = {}
    for path in _files(folder):
        with suppress(OSError):
            status = path.stat()
            old = time.time() - max(status.st_mtime, status.st_ctime) > YOUNG
            number = path.name.split("_")[0]
            locked = number.isdecimal() and _lock(int(number), folder).exists()
            if OTHERS.fullmatch(path.name) and status.st_uid == os.getuid() and old and not locked:
                found[str(path)] = path
    if not found:
        return []
    opened = _open_files()
    return [path for name, path in found.items() if name not in opened]


def sees_all_processes() -> bool:
    """Whether no process can have a block open that this one does not see: it is in no container."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_NAMESPACE
    except OSError:
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _lock(number: int, folder: Path) -> Path:
    return folder / f"precompose-{number}"


def _blocks(number: int, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{number:06}_*"))


def _remove_locks(number: int) -> None:
    """streaming locks two files per data set in the folder for temporary files, and leaves them there."""
    for lock in _blocks(number, Path(tempfile.gettempdir())):
        with suppress(OSError):
            lock.unlink()


def _free(folder: Path) -> Iterator[tuple[int, Path]]:
    """Numbers that no process uses, with their lock files."""
    for path in _files(folder):
        match = re.fullmatch(r"precompose-(\d+)", path.name)
        if match:
            with _locked(path) as free:
                pass
            if free:
                yield int(match[1]), path


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """A context in which this process holds a lock; yields False if another process or another user has it."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        free = False
    else:
        free = True
    try:
        yield free
    finally:
        os.close(file)


def _open_files() -> set[str]:
    """The files that processes have open or mapped, as far as this user may look."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            found |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(link))
    return found
