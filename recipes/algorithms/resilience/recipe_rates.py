"""Lets the recipe's optimizer settings replace those of a checkpoint."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from torch import Tensor
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
        self.counts: set[str] = set()  # what the optimizer counts in its groups

    def built(self, optimizer: Optimizer) -> None:
        """Remember the settings of a new optimizer, whose learning rates are the peak ones."""
        self.counts = set(optimizer.defaults) - _settings(optimizer)
        # Copies: schedules fill a learning rate that is a tensor, in place.
        self.groups = [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._watch_first_step(optimizer)

    def _watch_first_step(self, optimizer: Optimizer) -> None:
        """Of numbers in the groups alone, only a step says which ones it counts. PyTorch makes one before it loads."""
        before: list[dict[str, Any]] = []
        stepped = False

        def look(optimizer: Optimizer, *_: Any) -> None:
            if not stepped:
                before[:] = [dict(group) for group in optimizer.param_groups]

        def compare(optimizer: Optimizer, *_: Any) -> None:
            nonlocal stepped
            for old, new in zip(before, optimizer.param_groups, strict=True) if not stepped else ():
                numbers = {k for k, v in new.items() if isinstance(v, int | float) and old.get(k, v) != v}
                self.counts |= numbers - _settings(optimizer)
            stepped = True

        look.only_looks = compare.only_looks = True  # see `own_optimizers.is_own`
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(compare)

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
            settings = {name: value for name, value in settings.items() if name not in self.counts}
            group.update(settings | {"lr": rate, "initial_lr": peak})
            _place_steps(run.optimizer, group)
        run.peak_rates_changed()


def _place_steps(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Move the counts of steps of PyTorch's optimizers to where the group's settings want them.

    They are where the checkpoint's settings wanted them. With `fused`, a GPU would read the memory of the host, and
    without it, the host would wait for the GPU at each parameter.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    on_device = group.get("fused") or group.get("capturable")
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(parameter.device if on_device else "cpu")


def _settings(optimizer: Optimizer) -> set[str]:
    """Names of what may be given to an optimizer, and the learning rate. Other values in its groups that it changes
    are its own, such as a count of steps: a checkpoint has them."""
    classes = [kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer)]
    return {"lr", *(name for kind in classes for name in inspect.signature(kind.__init__).parameters)}
