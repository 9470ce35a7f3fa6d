"""Lets the recipe's optimizer settings replace those of a checkpoint."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from recipes.training.lever import Lever
from recipes.training.run import Run


class RecipeRates(Lever):
    """A checkpoint holds the learning rate, the weight decay and so on with which it was trained, and restores them.

    Where the recipe has changed them since, with `checkpoints.allow_changes`, or has others than the run of
    `checkpoints.load_path`, they would have no effect.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []

    def built(self, optimizer: Optimizer) -> None:
        """Remember the settings of a new optimizer, whose learning rates are the peak ones."""
        kept = {"params", *_counts(optimizer)}
        # Copies: schedules fill a learning rate that is a tensor, in place.
        self.groups = [{k: deepcopy(v) for k, v in group.items() if k not in kept} for group in optimizer.param_groups]

    def loaded(self, run: Run) -> None:
        groups = run.optimizer.param_groups
        # Where the checkpoint has one group for two, as after a change of decay_vectors, PyTorch may fill one of them.
        filled = next(group for group in groups if "lr" in group)
        for group, settings in zip(groups, self.groups, strict=True):
            saved = group if "lr" in group else filled
            peak, before = settings["lr"], saved.get("initial_lr")
            rate = saved["lr"]  # in every bit, where the peak is what it was
            if peak != before:
                rate = peak * (rate / before if before else 1.0)
            group.update(settings | {"lr": rate, "initial_lr": peak})
        run.peak_rates_changed()


def _counts(optimizer: Optimizer) -> set[str]:
    """Values that an optimizer keeps in its groups and nobody sets, such as a count of steps: a checkpoint has them."""
    classes = [kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer)]
    settings = {name for kind in classes for name in inspect.signature(kind.__init__).parameters}
    return set(optimizer.defaults) - settings
