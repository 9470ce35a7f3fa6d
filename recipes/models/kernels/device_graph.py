"""CUDA graphs as this package uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_for_graph = ContextVar("_for_graph", default=False)


def has_graphs(device: torch.device) -> bool:
    """Whether a device can run graphs."""
    return device.type == "cuda"


def memory_pool() -> Any:
    """Memory for graphs that always run in the order in which they were captured: they reuse that of one another."""
    return torch.cuda.graph_pool_handle()


@contextmanager
def for_graph() -> Iterator[None]:
    """A context in which the kernels of a graph are tried and captured: it launches them without the host's work."""
    token = _for_graph.set(True)
    try:
        yield
    finally:
        _for_graph.reset(token)


def is_for_graph() -> bool:
    """Whether what runs now will be launched as a graph, so that the host's time for launches does not count."""
    return _for_graph.get()


class DeviceGraph:
    """Kernels that are launched together, on the memory with which they were captured."""

    def __init__(self, pool: Any) -> None:
        """
        Args:
            pool: from `memory_pool`.
        """
        self.graph = torch.cuda.CUDAGraph()
        self.pool = pool

    def capture(self) -> AbstractContextManager[None]:
        """Inside, kernels are captured and do not run."""
        # Threads that load data may allocate memory meanwhile, which the default mode forbids.
        return torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local")

    def replay(self) -> None:
        """Launch the kernels."""
        self.graph.replay()
