"""Names of streaming's shared memory that no other run has.

streaming numbers the data sets of a machine from 0: it looks for the first name that does not exist, and then makes it.
Two runs that look at the same moment take the same name, and one of them fails; what a killed container has left with
`--ipc=host` stays in the way; and each look opens the memory of all data sets before. Here each data set begins at a
number of its own, drawn at random, and finds it free at once. What killed processes have left is removed first (see
`data.encoded.stale_memory`).
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from os import environ, uname
from pathlib import Path
from zlib import crc32

import torch.distributed as dist
from streaming.base.shared import memory, prefix

from data.encoded.stale_memory import clear, hold
from data.system.locks import held

BITS = 48
PATIENCE = 60.0  # seconds for a process that has made memory to give it a size; one that was killed never does

_caches: dict[Path, ExitStack] = {}  # that this process has locked, until it ends


@contextmanager
def own_names() -> Iterator[None]:
    """A context in which a StreamingDataset gets names that no other one has, and its ranks on other machines others.
    Every rank must enter it."""
    drawn = [secrets.randbits(BITS)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(drawn, src=0)
    if environ.get("LOCAL_RANK", "0") == "0":
        clear()
    # streaming's locks are files in the folder for temporary files, which machines may share.
    number = drawn[0] ^ crc32(uname().nodename.encode())
    hold(number)
    numbers = prefix._each_prefix_int
    prefix._each_prefix_int = lambda: itertools.count(number)
    try:
        with sized_memory():
            yield
    finally:
        prefix._each_prefix_int = numbers


class Sized(SharedMemory):
    """Memory that is opened once it has a size. Another process gives it one a moment after its name; streaming waits
    7 ms for that: on a busy machine, ranks ended with `cannot mmap an empty file`."""

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                super().__init__(name, create, size)
                return
            except ValueError as error:
                if create or "empty file" not in str(error) or time.monotonic() > end:
                    raise
                self.close()  # its file
                time.sleep(0.01)


@contextmanager
def sized_memory() -> Iterator[None]:
    """A context in which streaming waits for the size of memory that another rank of this machine makes."""
    theirs = memory.BuiltinSharedMemory
    memory.BuiltinSharedMemory = Sized
    try:
        yield
    finally:
        memory.BuiltinSharedMemory = theirs


def lock_cache(folder: str) -> None:
    """Keeps other runs on this machine from using a cache, until this process ends; both would evict shards of it.

    streaming refuses it too, but only if it sees the other run's names.

    Raises:
        ValueError: another run uses it.
    """
    path = Path(folder).resolve()
    if path in _caches or environ.get("LOCAL_RANK", "0") != "0":
        return
    stack = ExitStack()
    busy = f"cache: {folder} is in use by another run ({{holder}}); give each run on a machine a cache of its own"
    stack.enter_context(held(path / f".lock-{uname().nodename}", busy))
    _caches[path] = stack
