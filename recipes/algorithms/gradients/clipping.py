"""Gradient clipping by the norm of the whole gradient, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.training.lever import Lever
from recipes.training.run import Run

LOG_EVERY = 10  # batches; reading the norm makes the program wait for the device


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients in place so that the L2 norm of all of them is at most `largest`; returns the norm before, ().

    Every rank must call it where parameters are sharded: the norm is that of the whole gradient.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ClipByNorm(Lever):
    """Clips what the optimizer sees, and logs the gradient's norm.

    Composer's own clipping looks for FSDP1 where a model is sharded, and leaves FSDP2's gradients as they are.
    """

    def __init__(self, largest: float) -> None:
        """
        Args:
            largest: L2 norm of the whole gradient.
        """
        self.largest = largest

    def clip_gradients(self, run: Run) -> None:
        norm = clip_by_norm(run.task.parameters(), self.largest)
        if run.clock.batch % LOG_EVERY == 0:
            run.log({"gradient/norm": norm.item()})
