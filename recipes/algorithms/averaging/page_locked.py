"""Page-locked host memory of exactly the size of some tensors, from which and to which GPUs copy beside other work."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor

from data.system.log import log

ALIGNMENT = 64  # bytes; a line of a CPU's cache


class PageLocked:
    """Memory for tensors that are copied to and from a GPU, locked as long as this object lives.

    PyTorch's allocator of page-locked memory (`pin_memory=True`) rounds sizes to powers of two, which would be up to
    twice the size of a model. Here whole pages are taken from the system and registered with CUDA.

    Attributes:
        views: one tensor per given tensor, uninitialised, with its shape, dtype and memory format.
        bytes: size of the memory.
    """

    def __init__(self, like: list[Tensor]) -> None:
        """
        Args:
            like: tensors on any device.
        """
        starts, end = [], 0
        for tensor in like:
            starts.append(end)
            end += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        self.bytes = max(end, 1)
        # Private pages that processes forked later, such as workers of a loader, do not get: a device writes to them.
        pages = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        block = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
        self.views = [_view(block, start, tensor) for start, tensor in zip(starts, like, strict=True)]
        error = _register(block)
        if error:
            log.warning(
                f"scheduled_ema: {self.bytes / 1e9:.1f} GB of host memory could not be page-locked ({error}); training "
                "waits for each copy of the weights"
            )
        else:
            weakref.finalize(self, _unregister, block)


def _view(block: Tensor, start: int, tensor: Tensor) -> Tensor:
    # Strides of empty_like: dense, in the memory format of the tensor.
    strides = torch.empty_like(tensor, device="meta").stride()
    part = block[start : start + tensor.numel() * tensor.itemsize].view(tensor.dtype)
    return part.as_strided(tensor.shape, strides)


def _register(block: Tensor) -> str | None:
    """Lock the pages of a tensor for all GPUs of this process; returns why they cannot be, or None."""
    cudart, portable = torch.cuda.cudart(), 1  # cudaHostRegisterPortable
    error = cudart.cudaHostRegister(block.data_ptr(), block.numel(), portable)
    if int(error) == 0:
        return None
    # CUDA keeps the error until it is read. PyTorch reads it after the next kernel, which would be blamed for it.
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cuda")
    return cudart.cudaGetErrorString(error)


def _unregister(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
