"""Optimizers that are not PyTorch's, whose states checkpoints give back as they were.

PyTorch casts floating-point parameters' states to the number format of the parameter: a moment of 16 bits would have 32
from then on, and integers would be rounded. To find out which states an optimizer has, it makes a step with gradients
and learning rates of 0, by which one that decays weights on its own, or counts its steps, would change what was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as theirs
from torch.optim import Optimizer
from torch.utils._pytree import tree_map


def is_own(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is not one of PyTorch's, or has hooks, which may do what a step of one's own may
    do. `check_kept` has one that only looks."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    hooked = any(getattr(hook, "__module__", None) != "recipes.engines.check_classes" for hook in hooks)
    return hooked or not type(optimizer).step.__module__.startswith("torch.optim.")


def keep_formats(optimizer: Optimizer) -> None:
    """Make an optimizer load its states in the number formats in which they were saved. `step` is left to PyTorch."""
    if not is_own(optimizer):
        return
    loading: dict[str, Any] = {}

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        loading.update(state)

    def after(_: Optimizer) -> None:
        numbers, parameters = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (loading["param_groups"], optimizer.param_groups)
        )
        for number, parameter in zip(numbers, parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for name, saved in loading["state"].get(number, {}).items():
                if name != "step" and name in state:
                    state[name] = tree_map(_as_saved, state[name], saved)
        loading.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _as_saved(loaded: Any, saved: Any) -> Any:
    cast = isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype
    return saved.to(loaded.device) if cast else loaded


@contextmanager
def steps_of_nothing() -> Iterator[None]:
    """A context in which the step that finds out an optimizer's states changes neither weights nor its groups."""
    find_out = theirs._init_optim_state

    @torch.no_grad()
    def changing_nothing(optimizer: Optimizer) -> None:
        if optimizer.state or not is_own(optimizer):
            find_out(optimizer)
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        weights = [parameter.detach().clone() for parameter in parameters]
        groups = [deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        find_out(optimizer)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)

    theirs._init_optim_state = changing_nothing
    try:
        yield
    finally:
        theirs._init_optim_state = find_out
