"""A folder that one process at a time may write to."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.disk_errors import about
from data.log import log

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(path: Path, busy: str) -> Iterator[None]:
    """Holds the lock of a file, which is created where it is missing, until the block ends.

    The system releases it when the process ends, however it ends, and processes that are forked from it do not have it.
    A process that holds it already may take it again. Network file systems have such locks across machines, unless
    they are mounted without; then there is a warning, and no protection.

    Args:
        path: of the file, whose only content is who holds the lock.
        busy: the error's text; {holder} in it is replaced by the machine and the process.

    Raises:
        ValueError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(file, 200).decode("utf-8", "replace").strip() or "another process"
                raise ValueError(busy.replace("{holder}", holder)) from None
            if error.errno not in UNSUPPORTED:
                raise
            log.warning(f"{path}: this file system has no locks ({error.strerror}); start one job at a time")
        with about(path):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(file)
