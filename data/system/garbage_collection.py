"""How often Python looks for objects that refer to each other in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made and not yet freed at which the youngest are searched, and how many such searches make one of the older
# ones. Python's own numbers are 700, 10 and 10.
RARELY = (100_000, 20, 100)


@contextmanager
def rare_searches() -> Iterator[None]:
    """Within it, and in a function decorated by it, Python rarely searches for cycles.

    Imports make half a million objects that stay, and Python searches all of them again and again while they are made:
    an eighth of the CPU time of importing Composer and diffusers. Afterwards it is as before, because what a batch
    leaves behind in cycles may hold a device's memory.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
