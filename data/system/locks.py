"""A folder that one process at a time may write to."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.system.disk_errors import about
from data.system.log import log

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
PAUSE = 0.5  # seconds between two looks at a lock that another process holds


class HeldByAnother(ValueError):
    """Another process holds a lock."""


@contextmanager
def held(path: Path, busy: str, patience: float = 0.0) -> Iterator[None]:
    """Holds the lock of a file, which is created where it is missing, until the block ends.

    The system releases it when the process ends, however it ends, and processes that are forked from it do not have it.
    A process that holds it already may take it again. Network file systems have such locks across machines, unless
    they are mounted without; then there is a warning, and no protection.

    Args:
        path: of the file, whose only content is who holds the lock.
        busy: the error's text; {holder} in it is replaced by the machine and the process.
        patience: seconds for which it waits for another process, after a line that says so.

    Raises:
        HeldByAnother: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        taken, end = _take(file, path), time.monotonic() + patience
        if not taken and patience:
            log.info(f"{busy.replace('{holder}', _holder(file))}; this one waits up to {patience:.0f} s")
        while not taken and time.monotonic() < end:
            time.sleep(min(PAUSE, patience))
            taken = _take(file, path)
        if not taken:
            raise HeldByAnother(busy.replace("{holder}", _holder(file)))
        with about(path):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(file)


@contextmanager
def in_turn(path: Path, place: int) -> Iterator[None]:
    """Holds one byte of a file, which is created where it is missing; other processes and threads wait for it.

    Unlike `held`, it is an open file's and not a process's. Where the file system has no such locks, nobody waits.

    Args:
        path: of the file, which stays empty.
        place: number of the byte.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _set_byte(file, fcntl.F_WRLCK, place)
        try:
            yield
        finally:
            _set_byte(file, fcntl.F_UNLCK, place)  # a process that was forked meanwhile has the file open, too
    finally:
        os.close(file)


def _set_byte(file: int, kind: int, place: int) -> None:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", kind, os.SEEK_SET, place, 1, 0))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _take(file: int, path: Path) -> bool:
    """Whether this process holds the lock of an open file now, or the file system has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in UNSUPPORTED:
            raise
        log.warning(f"{path}: this file system has no locks ({error.strerror}); start one job at a time")
    return True


def _holder(file: int) -> str:
    """What the process that holds the lock says of itself."""
    return os.pread(file, 200, 0).decode("utf-8", "replace").strip() or "another process"
