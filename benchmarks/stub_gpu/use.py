"""What a process on the stub GPU changes, because kernels do not run there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.algorithms.resilience import guard

SMALL = 64  # elements


class Counts:
    """What the host has done since this process began."""

    def __init__(self) -> None:
        self._stub = ctypes.CDLL(None)  # it is loaded before everything else
        for function in (self._stub.stub_launches, self._stub.stub_waits, self._stub.stub_strays):
            function.restype = ctypes.c_long

    @property
    def launches(self) -> int:
        """Kernels launched."""
        return self._stub.stub_launches()

    @property
    def waits(self) -> int:
        """Times that the host waited for what it had launched, also to copy from memory that is not page-locked."""
        return self._stub.stub_waits()

    @property
    def strays(self) -> int:
        """Kernels launched on other streams while a stream was captured, so that they are not in its graph."""
        return self._stub.stub_strays()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is counted."""
        self._stub.stub_count(0)
        try:
            yield
        finally:
            self._stub.stub_count(1)


def compute_decisions_on_host() -> None:
    """Make the tensors from which the host reads what to do next, such as whether gradients are finite, on the host.

    They are flags and numbers of samples, in tensors of integers. Everything else that the host reads is zero or
    meaningless.
    """
    full, stack, add = torch.full, torch.stack, Tensor.__iadd__
    counts = Counts()

    def host_full(size: Any, value: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda" or tuple(size):
            return full(size, value, *args, device=device, **kwargs)
        with counts.paused():
            return full(size, value, *args, **kwargs).to(device)

    def host_stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
        first = tensors[0]
        if not first.is_cuda or first.numel() > SMALL or first.is_floating_point():
            return stack(tensors, dim, **kwargs)
        with counts.paused():
            return stack([t.cpu() for t in tensors], dim, **kwargs).to(first.device)

    def host_add(self: Tensor, other: Any) -> Tensor:  # Composer counts finished loaders in a tensor
        if not self.is_cuda or self.numel() > SMALL or self.is_floating_point() or isinstance(other, Tensor):
            return add(self, other)
        with counts.paused():
            return self.copy_(self.cpu() + other)

    torch.full, torch.stack = host_full, host_stack
    Tensor.__iadd__ = host_add  # type: ignore[assignment, method-assign]
    guard.largest_magnitude = lambda tensors: torch.zeros(())


def exchange_decisions_on_host(collectives: str) -> None:
    """Make ranks exchange objects and small tensors of integers on the host: the stub leaves each rank its own.

    Args:
        collectives: path of a file to which the stub adds a line for each collective of NCCL that this rank calls.
    """
    os.environ["STUB_COLLECTIVES"] = collectives
    create, all_reduce = dist.init_process_group, dist.all_reduce
    counts = Counts()

    def create_with_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        create("cpu:gloo,cuda:nccl", *args, **kwargs)

    def host_all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_cuda or tensor.numel() > SMALL or tensor.is_floating_point() or kwargs.get("async_op"):
            return all_reduce(tensor, *args, **kwargs)
        with counts.paused():
            on_host = tensor.cpu()
            all_reduce(on_host, *args, **kwargs)
            tensor.copy_(on_host)

    dist.init_process_group, dist.all_reduce = create_with_gloo, host_all_reduce
    dist.get_backend = lambda group=None: "nccl"  # Composer compares it with its own
