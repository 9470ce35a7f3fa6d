"""On which device Triton launches kernels, without asking CUDA for more than it must before each."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

MOST_CYCLES = 2e9  # per second, of any GPU so far


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which kernels are launched on the device of a tensor."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


@functools.cache
def processors_of(device: torch.device) -> int:
    """Number of multiprocessors of a device; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def hold(seconds: float) -> None:
    """Let the current GPU wait for at least so long. What the host launches meanwhile then runs without waiting for
    the host: its own time can be measured."""
    torch.cuda._sleep(int(seconds * MOST_CYCLES))
