"""Gives the first batch after a start from a checkpoint the learning rate of the recipe as it is now."""

from __future__ import annotations

import torch

from recipes.training.lever import Lever
from recipes.training.run import Run
from recipes.training.schedules import Schedule


class FirstRate(Lever):
    """Engines set the rate of a batch at the end of the one before it, so that a checkpoint has that of its next batch.

    Where the schedule, the peak or the length of the run has changed since, the first batch would still be trained with
    the rate of the recipe as it was.
    """

    def __init__(self, schedule: Schedule, samples: int) -> None:
        """
        Args:
            schedule: of the recipe.
            samples: of a batch, over all ranks.
        """
        self._schedule = schedule
        self._samples = samples

    def begin(self, run: Run) -> None:
        if run.clock.batch == 0:
            return
        factor = self._schedule(run.clock.before_last_batch(self._samples))
        for group in run.optimizer.param_groups:
            rate = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
