"""Gradient clipping by the norm of the whole gradient, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.algorithms.gradients.order import GradientStage

LOG_EVERY = 10  # batches; reading the norm makes the program wait for the device


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients in place so that the L2 norm of all of them is at most `largest`; returns the norm before, ().

    Every rank must call it where parameters are sharded: the norm is that of the whole gradient.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ClipByNorm(Algorithm):
    """Clips what the optimizer sees, and logs the gradient's norm.

    Composer's own clipping looks for FSDP1 where a model is sharded, and leaves FSDP2's gradients as they are.
    """

    gradient_stage = GradientStage.CLIP

    def __init__(self, largest: float) -> None:
        """
        Args:
            largest: L2 norm of the whole gradient.
        """
        self.largest = largest

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH  # gradients of all microbatches are there, without a scaler's factor

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        norm = clip_by_norm(state.model.parameters(), self.largest)
        if state.timestamp.batch.value % LOG_EVERY == 0:
            logger.log_metrics({"gradient/norm": norm.item()})
