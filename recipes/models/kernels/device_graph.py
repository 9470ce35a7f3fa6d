"""CUDA graphs as this package uses them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def has_graphs(device: torch.device) -> bool:
    """Whether a device can run graphs."""
    return device.type == "cuda"


def memory_pool() -> Any:
    """Memory for graphs that always run in the order in which they were captured: they reuse that of one another."""
    return torch.cuda.graph_pool_handle()


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
