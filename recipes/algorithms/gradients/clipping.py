"""Gradient clipping by the norm of the whole gradient, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.algorithms.sixteen_bit.fp16_weights import clip, factor_of
from recipes.training.lever import Lever
from recipes.training.run import Run

LOG_EVERY = 10  # batches; reading the norm synchronises with the device


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients in place so that their total L2 norm is at most `largest`; returns the norm before, of shape ().

    If parameters are sharded, every rank must call it: the norm is that of the whole gradient.
    """
    parameters = list(parameters)
    if any(factor_of(p) is not None for p in parameters):
        return clip(parameters, largest)
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ClipByNorm(Lever):
    """Clips the gradients that the optimizer sees, and logs their norm before clipping every 10 batches.

    Clipping of the engines is not used: Composer's looks for FSDP1, and leaves the gradients of FSDP2 unclipped.
    """

    def __init__(self, largest: float) -> None:
        """
        Args:
            largest: largest L2 norm of the whole gradient.
        """
        self.largest = largest

    def clip_gradients(self, run: Run) -> None:
        norm = clip_by_norm(run.trained, self.largest)
        if run.clock.batch % LOG_EVERY == 0:
            run.log({"gradient/norm": norm.item()})
