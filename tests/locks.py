"""A lock that another process holds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.system.locks import held


@contextmanager
def held_by_a_child(path: Path) -> Iterator[int]:
    """A forked process holds the lock of a file until the block ends.

    Args:
        path: of the file.

    Yields:
        The number of the process.
    """
    (ready, begun), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        with held(path, ""):
            os.write(begun, b".")
            os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for descriptor in ready, begun, wait:
            os.close(descriptor)
