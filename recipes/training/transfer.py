"""Small tables of numbers from the host to a device, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers on a device, without waiting for the device.

    A copy from ordinary host memory makes the host wait until everything that the device was given before is done,
    such as the whole backward pass. A copy from page-locked memory does not; PyTorch keeps that memory until the copy
    is done.
    """
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


class HostCopy:
    """Numbers of a device on their way to the host, which launches more work before it reads them.

    `Tensor.tolist()` makes the host wait for all that the device was given by then, such as the update of the weights,
    and the device then has nothing to do until the host launches the next step. This copy waits only for what was given
    to the device before it.
    """

    def __init__(self, numbers: Tensor) -> None:
        """
        Args:
            numbers: copied to page-locked memory if they are on a GPU.
        """
        self._numbers = numbers.to("cpu", non_blocking=True, copy=True)
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> Any:
        """As `Tensor.tolist`; the host waits until the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()
