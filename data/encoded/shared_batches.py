"""Blocks of shared memory in which worker processes send batches to the training process, and which are reused.

PyTorch allocates new shared memory for every batch of a worker. Each of its pages is cleared and mapped in both
processes, which takes several times as long as reading the samples, and each tensor is sent as a file descriptor. Here
the blocks are allocated once, before the workers are forked, and a block is free again when the last tensor on it is
deleted. The memory is anonymous, so a killed run leaves nothing behind, and the size of /dev/shm does not matter.
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
"""Shapes and dtypes of a batch's tensors, by name."""

ALIGNMENT = 64  # bytes

_numbers = itertools.count()
_blocks: WeakValueDictionary[int, BatchBlocks] = WeakValueDictionary()


class BatchBlocks:
    """Blocks that each hold one batch, shared with processes that are forked later.

    Args:
        count: number of blocks. Batches that find no free block are sent by PyTorch's own way.
        size: size of the largest batch in bytes, as `bytes_of` counts it.
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
        """An uninitialised batch. In a worker process it lies in a free block, and only the block's number is sent."""
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
            block = self._taken.find(b"\0", 0)  # the lowest, so that few blocks are ever used
            if block < 0:
                return None
            self._taken[block] = 1
            return block

    def _bytes(self, block: int) -> np.ndarray:
        return self._memory[block * self.size : (block + 1) * self.size]

    def __reduce__(self) -> tuple[type[BatchBlocks], tuple[int, int]]:
        return BatchBlocks, (0, self.size)  # a process that is not forked cannot have the anonymous memory


class _SentAsNumber(dict):
    """A batch of a worker. The receiver unpickles it as a plain dict of tensors on the same block."""

    def __init__(self, blocks: int, block: int, specs: Specs, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._sent = blocks, block, specs

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._sent


def _receive(blocks: int, block: int, specs: Specs) -> dict[str, Tensor]:
    return _tensors(np.asarray(_Lease(_blocks[blocks], block)), specs)


class _Lease:
    """Owns the memory of a received batch, and is deleted with the last of its tensors."""

    def __init__(self, blocks: BatchBlocks, block: int) -> None:
        self._owner = os.getpid()
        self._blocks = blocks
        self._block = block
        self.__array_interface__ = blocks._bytes(block).__array_interface__

    def __del__(self) -> None:
        # A process that was forked in between has a copy of this object, but does not use the block.
        if os.getpid() == self._owner:
            self._blocks._taken[self._block] = 0


def bytes_of(specs: Specs) -> int:
    """Number of bytes that a batch takes in a block."""
    return sum(-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in specs.values())


def _tensors(memory: np.ndarray, specs: Specs) -> dict[str, Tensor]:
    tensors, offset = {}, 0
    for name, (shape, dtype) in specs.items():
        size = prod(shape) * dtype.itemsize
        tensors[name] = torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tensors
