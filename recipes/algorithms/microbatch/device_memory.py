"""How much of a GPU's memory a section of training takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reading:
    """Memory of a section of training, in bytes.

    Attributes:
        held: memory that the process had reserved on the device when the section began.
        growth: peak memory on top of that.
        usable: memory that the process can reserve in total.
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
        """Begin a section.

        Cached blocks are freed first: blocks left over from batches of other sizes would distort the measurement.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def read(self) -> Reading:
        """The memory of the section that `start` began.

        Growth is that of allocated or of reserved memory, whichever is more: tensors may have been placed into memory
        that was reserved before, and reservations are larger than their tensors.
        """
        allocated = torch.cuda.max_memory_allocated() - self.allocated
        reserved = torch.cuda.max_memory_reserved() - self.reserved
        free, _ = torch.cuda.mem_get_info()
        # What other processes, NCCL and the CUDA context hold is neither free nor reserved.
        usable = min(
            free + torch.cuda.memory_reserved(), int(torch.cuda.get_per_process_memory_fraction() * self.total)
        )
        return Reading(held=self.reserved, growth=max(allocated, reserved), usable=usable)


def free_memory() -> int:
    """Bytes of this process's GPU that neither its tensors, at their peak, nor other processes have taken."""
    free, _ = torch.cuda.mem_get_info()
    return max(0, free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated())
