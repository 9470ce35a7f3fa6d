"""Lets the recipe's optimizer settings replace those of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from recipes.training.lever import Lever
from recipes.training.run import Run


class RecipeRates(Lever):
    """A checkpoint holds the learning rate, the weight decay and so on with which it was trained, and restores them.

    Where the recipe has changed them since, with `checkpoints.allow_changes`, they would have no effect.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []

    def built(self, optimizer: Optimizer) -> None:
        """Remember the settings of a new optimizer, whose learning rates are the peak ones."""
        self.groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def loaded(self, run: Run) -> None:
        for group, settings in zip(run.optimizer.param_groups, self.groups, strict=True):
            peak, before = settings["lr"], group.get("initial_lr")
            # Not also where the rate is the same: a quotient and a product are rounded.
            rate = group["lr"] if before == peak else peak * (group["lr"] / before if before else 1.0)
            group.update(settings | {"lr": rate, "initial_lr": peak})
        run.peak_rates_changed()
