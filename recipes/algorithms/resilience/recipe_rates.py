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
            peak = settings["lr"]
            factor = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0
            group.update(settings | {"lr": peak * factor, "initial_lr": peak})
        run.peak_rates_changed()
