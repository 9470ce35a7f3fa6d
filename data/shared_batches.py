"""Memory that worker processes fill with batches and the process that trains reads them from, used again and again.

A worker's batch usually lies in shared memory made for it: each of its pages is cleared and mapped anew in both
processes, which costs several times what the reading does, and each of its tensors is sent as a file descriptor. Here
the blocks are made once, before the workers are forked, and a block is free again when the last tensor on it is gone.
They are anonymous: nothing is left behind by a killed run, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
from collections.abc import Mapping
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and number formats of a batch's tensors, by name."""

ALIGNMENT = 64  # bytes

_numbers = itertools.count()
_blocks: WeakValueDictionary[int, BatchBlocks] = WeakValueDictionary()


class BatchBlocks:
    """Blocks for whole batches, shared with processes that are forked later.

    Args:
        count: batches that can be under way or in use at once; those beyond it are sent in memory of their own.
        size: bytes of the largest batch, as `bytes_of` counts them.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._number = next(_numbers)
        _blocks[self._number] = self
        if count:
            self._memory = np.frombuffer(mmap.mmap(-1, count * self.size), np.uint8)
            self._taken = mmap.mmap(-1, count)
            self._lock = multiprocessing.Lock()

    def new(self, specs: Specs) -> dict[str, Tensor]:
        """An uninitialised batch. In a worker process it lies in a free block and is sent as the block's number."""
        block = None
        if get_worker_info() is not None and bytes_of(specs) <= self.size:
            block = self._take()
        if block is None:
            return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
        return _SentAsNumber(self._number, block, specs, _tensors(self._bytes(block), specs))

    def _take(self) -> int | None:
        if not self.count:
            return None
        with self._lock:
            block = self._taken.find(b"\0", 0)  # the lowest, so that few are ever touched
            if block < 0:
                return None
            self._taken[block] = 1
            return block

    def _bytes(self, block: int) -> np.ndarray:
        return self._memory[block * self.size : (block + 1) * self.size]

    def __reduce__(self) -> tuple[type[BatchBlocks], tuple[int, int]]:
        return BatchBlocks, (0, self.size)  # anonymous memory cannot follow into a process that is not forked


class _SentAsNumber(dict):
    """A worker's batch; unpickled by the receiver as a plain dict of tensors on the same block."""

    def __init__(self, blocks: int, block: int, specs: Specs, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._sent = blocks, block, specs

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._sent


def _receive(blocks: int, block: int, specs: Specs) -> dict[str, Tensor]:
    return _tensors(np.asarray(_Lease(_blocks[blocks], block)), specs)


class _Lease:
    """Under every tensor of a received batch, as the owner of their memory: deleted with the last of them."""

    def __init__(self, blocks: BatchBlocks, block: int) -> None:
        self._owner = os.getpid()
        self._blocks = blocks
        self._block = block
        self.__array_interface__ = blocks._bytes(block).__array_interface__

    def __del__(self) -> None:
        # A process forked meanwhile has a copy of this object, but does not hold the block.
        if os.getpid() == self._owner:
            self._blocks._taken[self._block] = 0


def bytes_of(specs: Specs) -> int:
    """Size of a batch in a block."""
    return sum(-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in specs.values())


def _tensors(memory: np.ndarray, specs: Specs) -> dict[str, Tensor]:
    tensors, offset = {}, 0
    for name, (shape, dtype) in specs.items():
        size = prod(shape) * dtype.itemsize
        tensors[name] = torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tensors
