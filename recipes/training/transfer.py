"""Small tables of numbers from the host to a device."""

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
