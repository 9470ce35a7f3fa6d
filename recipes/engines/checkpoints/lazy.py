"""Checkpoints that are read lazily: their tensors stay in the file until they are used.

Otherwise each process of a machine would hold a whole checkpoint. What is kept must have memory of its own, because the
file may be removed, also by another machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def copied(value: Any) -> Any:
    """A value of a checkpoint whose tensors have memory of their own."""
    return tree_map_only(Tensor, torch.clone, value)


def copy_moments(optimizer: Optimizer) -> None:
    """Copy the state of an optimizer that was loaded: PyTorch takes over tensors that are on the right device."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    for values in optimizer.state.values():
        values |= tree_map_only(Tensor, copy, values)
