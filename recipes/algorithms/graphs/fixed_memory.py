"""The memory that CUDA graphs read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class GraphMemory:
    """Memory of the graphs of a model, and which tensors of the present microbatch are in it.

    Graphs read their inputs from fixed memory. What another graph has written, or copied to its own inputs, is read
    there: nothing is copied from one graph to the next, and an input of several graphs, such as the text in a denoiser,
    is copied once.

    Graphs of one microbatch are captured in the order in which they run, and may use memory that others have left.
    A block that runs in a later microbatch for the first time must not: its graphs would write to what blocks before it
    have kept for their backward passes, which had left this memory when they were captured.
    """

    def __init__(self, new_pool: Callable[[], Any]) -> None:
        """
        Args:
            new_pool: `recipes.models.kernels.device_graph.memory_pool`.
        """
        self._new_pool = new_pool
        self._pool: Any = None
        # id -> the tensor, which is kept so that nothing else gets its id; its version; its values in fixed memory
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    @property
    def pool(self) -> Any:
        """The pool of the graphs that are captured in this microbatch."""
        if self._pool is None:
            self._pool = self._new_pool()
        return self._pool

    def forget(self) -> None:
        """A microbatch begins or has ended."""
        self._known.clear()
        self._pool = None

    def add(self, tensor: Tensor, fixed: Tensor) -> None:
        """`fixed` holds the values of `tensor` until the end of this microbatch."""
        self._known[id(tensor)] = tensor, tensor._version, fixed

    def find(self, tensor: Tensor) -> Tensor | None:
        """Fixed memory with the values of a tensor; None if there is none, or the tensor was changed in place."""
        _, version, fixed = self._known.get(id(tensor), (None, None, None))
        return fixed if version == tensor._version else None


class Inputs:
    """The fixed memory of the inputs of one graph.

    Attributes:
        fixed: one tensor per input. At first they hold the values of the tensors from which this was made.
    """

    def __init__(self, tensors: Sequence[Tensor], memory: GraphMemory) -> None:
        self.memory = memory
        self.fixed: list[Tensor] = []
        self.own: list[bool] = []  # whether nothing else writes there
        for tensor in tensors:
            fixed = memory.find(tensor)
            self.own.append(fixed is None)
            if fixed is None:
                fixed = tensor.detach().clone()
                memory.add(tensor, fixed)
            self.fixed.append(fixed)

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy what is not there yet.

        Raises:
            RuntimeError: a tensor does not come from the graph that wrote it when this was made.
        """
        copied = []
        for tensor, fixed, own in zip(tensors, self.fixed, self.own, strict=True):
            if self.memory.find(tensor) is fixed:
                continue
            if not own:
                raise RuntimeError("cuda_graphs: the blocks of the model are not called as before; remove the lever")
            copied.append((fixed, tensor))
            self.memory.add(tensor, fixed)
        if copied:
            torch._foreach_copy_([fixed for fixed, _ in copied], [tensor for _, tensor in copied])
