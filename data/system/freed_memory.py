"""Freed host memory that the C library keeps for later, given back to the system.

glibc keeps freed memory that other memory lies behind, and tensors of up to 32 MB leave gaps that grow to the size of
all that are held at once. Other C libraries have no such functions, and nothing is done.
"""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # of malloc.h


def give_back() -> None:
    """Give back what is free now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_from_now_on() -> None:
    """Make pieces of a megabyte or more go back as soon as they are freed, until the process ends. Each piece then
    costs calls of the system, so it is not for a process that trains."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 1 << 20)
