"""How much memory this process may take, that of the machine or less where it runs in a container, and its lack."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotEnoughMemory(MemoryError):
    """A file cannot be read because memory is lacking; the file may be whole. Its text is one line for the user."""


@contextmanager
def memory_to_read(name: object, size: int) -> Iterator[None]:
    """A context for reading a file, which tells a lack of memory from damaged bytes.

    Damaged bytes may claim more than any memory holds, and the libraries then raise the same. So memory is lacking only
    where the system has none for the size of the file either.

    Args:
        name: of the file, in the error.
        size: bytes of the file.

    Raises:
        NotEnoughMemory: memory is lacking. Other errors, also of damaged bytes, stay as they are.
    """
    try:
        yield
    except Exception as error:
        if _says_so(error) and _is_refused(size):
            raise NotEnoughMemory(f"{name}: {size:,} bytes do not fit into the memory that is left") from error
        raise


def _says_so(error: Exception) -> bool:
    """Whether an error is one of memory, in the words of Python, of the system or of PyTorch."""
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return of_system or of_torch or isinstance(error, MemoryError)


def _is_refused(size: int) -> bool:
    try:
        mmap.mmap(-1, max(size, 1)).close()  # which takes no memory before it is written to
    except (OSError, MemoryError):
        return True
    return False


def limit(processes: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest limit in bytes of the control groups that a process is in, of version 1 or 2; None: there is none.

    Args:
        processes: names the groups of the process.
        groups: where the file system of groups is mounted.
    """
    found = []
    with suppress(OSError):
        for line in processes.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
            group = root / path.lstrip("/")
            # A group has the limits of all above it. In a container the path may be that of the machine, of which only
            # the last group is mounted, as the root.
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                with suppress(OSError, ValueError):  # "max": no limit
                    found.append(int((folder / name).read_text()))
    return min(found, default=None)


_MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEMORY = min(_MACHINE, limit() or _MACHINE)  # bytes
