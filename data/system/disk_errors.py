"""Errors of disks that a user can mend, in the forms in which Python and libraries report them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.system.errors import Outage

# What a user can do about each. Errors with other numbers are bugs, or are handled where they arise.
_ROOM, _RIGHTS, _DISK = "make room there", "check permissions and how it is mounted", "look at the disk and its mount"
ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ENOTCONN: _DISK,  # the process of a mount of FUSE has ended, such as that of a bucket
    errno.ETIMEDOUT: _DISK,  # of a file server
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a folder above it is a file: give another folder",
    errno.EISDIR: "a folder has the name of a file: give a file, or remove the folder",
    errno.EEXIST: "a file has the name of a folder: give another folder, or remove it",
    errno.ELOOP: "a link leads back to itself: give another folder",
}
LOST = (errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)  # of a mount whose server or process does not answer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNNAMED = (*FULL, errno.EIO, errno.ESTALE)  # of writes, whose errors do not name the file
_NOT_GIVEN = re.compile(r"unable to (?:open|mmap \d+ bytes from) file <(.*)>.*: .* \((\d+)\)")  # PyTorch cannot read
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


def disk_error(error: BaseException) -> OSError | None:
    """What the disk said, if an error is of a kind in `ADVICE`.

    An OSError is given back, and names the file that could not be written. Of the errors of NumPy, shutil, safetensors
    and PyTorch a new one is made, because these have no number.
    """
    if isinstance(error, OSError) and error.errno is not None:
        if error.filename2 is not None and error.errno in FULL:
            error.filename = error.filename2  # of a copy, which names the file that it reads first
        mended = error.errno in (ADVICE if error.filename is not None else UNNAMED)
        if error.errno == errno.EEXIST and not os.path.isfile(error.filename or ""):
            mended = False  # a folder that was made twice is a bug
        return error if mended else None
    if type(error).__name__ == "CheckpointException":  # of torch.distributed.checkpoint: rank -> (error, traceback)
        return next(filter(None, (disk_error(failure) for failure, _ in error.failures.values())), None)
    text = str(error)
    if isinstance(error, RuntimeError) and (match := re.search(r"open file failed with strerror: (.*)", text)):
        number = next((number for number in ADVICE if os.strerror(number) == match[1]), errno.EACCES)
        return OSError(number, match[1])
    if isinstance(error, RuntimeError) and "inline_container" in text and "PytorchStreamReader" not in text:
        # PyTorch does not say why it cannot write. If Python writes for it, that error came first.
        before = error.__context__
        found = None if before is None else disk_error(before)
        return found or OSError(errno.ENOSPC, "PyTorch cannot write all of it")
    if isinstance(error, RuntimeError) and (match := _NOT_GIVEN.match(text)):
        number = int(match[2])
        return OSError(number, os.strerror(number), match[1]) if number in ADVICE else None
    if isinstance(error, RuntimeError) and (match := re.fullmatch(r"File (.*) cannot be opened\.", text)):
        return OSError(errno.EACCES, "cannot be opened", match[1])  # nor does it say why here
    if not (isinstance(error, OSError) or type(error).__name__ == "SafetensorError"):
        return None
    if re.search(r"\d+ requested and \d+ written", text):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    numbers = [int(one or other) for one, other in _NUMBER.findall(text)]
    known = next((number for number in numbers if number in UNNAMED), None)
    return None if known is None else OSError(known, os.strerror(known))


def disk_line(error: OSError) -> str:
    """An error that `disk_error` gave, as a line that says where it is, what it is, and what to do."""
    where = f"{error.filename}: " if error.filename is not None else ""
    more = "" if error.filename is not None else ", or in /dev/shm or TMPDIR"
    return f"{where}{error.strerror}; {ADVICE[error.errno]}{more}, and start the same command again"


def may_pass(error: BaseException) -> bool:
    """Whether an error is of a store, a server or a mount that does not answer, and later may."""
    of_disk = disk_error(error)
    return isinstance(error, Outage | ConnectionError) or (of_disk is not None and of_disk.errno in LOST)


@contextmanager
def about(path: Path, partial: Path | None = None) -> Iterator[None]:
    """A context in which errors of the disk are OSErrors that name `path`: those of a failed write name nothing.

    Args:
        path: of the file or folder that is written.
        partial: its temporary name, which the user need not know.
    """
    try:
        yield
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        named = found.filename is not None
        if not named or (partial is not None and Path(os.fsdecode(found.filename)).is_relative_to(partial)):
            found.filename = str(path)
            del found.filename2  # of a rename
        if found is error:
            raise
        raise found from error
