"""How much of a GPU's memory a stretch of training takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reading:
    """Memory over a stretch of training, in bytes.

    Attributes:
        held: what the process had taken from the device as it began.
        growth: the most that came on top.
        usable: what the process may take in all.
    """

    held: int
    growth: int
    usable: int


class DeviceMemory:
    """The memory of this process's GPU, as PyTorch's allocator sees it.

    Attributes:
        total: of the device, in bytes.
    """

    def __init__(self) -> None:
        self.total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def start(self) -> None:
        """Begin a stretch.

        Cached blocks are given back first: pieces of another batch's sizes would be counted, or used, by chance.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def read(self) -> Reading:
        """What the stretch took.

        The growth is that of the tensors or that of what the allocator reserved for them, whichever is more: tensors
        may have gone into gaps of earlier reservations, and reservations are larger than their tensors.
        """
        allocated = torch.cuda.max_memory_allocated() - self.allocated
        reserved = torch.cuda.max_memory_reserved() - self.reserved
        free, _ = torch.cuda.mem_get_info()
        # What other processes, NCCL and the CUDA context hold is neither free nor reserved.
        usable = min(
            free + torch.cuda.memory_reserved(), int(torch.cuda.get_per_process_memory_fraction() * self.total)
        )
        return Reading(held=self.reserved, growth=max(allocated, reserved), usable=usable)
