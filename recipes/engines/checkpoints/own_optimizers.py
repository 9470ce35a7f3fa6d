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
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from recipes.engines.checkpoints.moments import add_empty


def is_own(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is not one of PyTorch's, or has hooks, which may do what a step of one's own may
    do, except for those with an attribute `only_looks`."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    hooked = not all(getattr(hook, "only_looks", False) for hook in hooks)
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
    if isinstance(saved, str):  # of which PyTorch makes the text of a generator
        return saved
    cast = isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype
    return saved.to(loaded.device) if cast else loaded


@contextmanager
def steps_of_nothing() -> Iterator[None]:
    """A context in which the step that finds out an optimizer's states changes neither weights nor its groups, and in
    which states are loaded of some parameters, or of none."""
    find_out = theirs._init_optim_state

    @torch.no_grad()
    def changing_nothing(optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        has_gradients = any(parameter.grad is not None for parameter in parameters)  # PyTorch makes no step then
        if optimizer.state or has_gradients or not is_own(optimizer):
            find_out(optimizer)
            return
        weights = [parameter.detach().clone() for parameter in parameters]
        groups = [deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        find_out(optimizer)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)

    load = theirs._load_optim_state_dict

    def load_any(model: nn.Module, optimizers: tuple[Optimizer, ...], state: dict[str, Any], info: Any) -> None:
        """PyTorch's takes it that an optimizer has states of all parameters, and that there is a tensor among them."""
        add_empty(state)
        for optimizer in optimizers:
            changing_nothing(optimizer)
            if is_own(optimizer) and info.full_state_dict:
                _check_all_made(optimizer, state["state"], info.fqn_param_mapping)
            if not _tensors(list(optimizer.state.values())):
                info.full_state_dict = False  # there is nothing to divide
        load(model, optimizers, state, info)

    theirs._init_optim_state, theirs._load_optim_state_dict = changing_nothing, load_any
    try:
        yield
    finally:
        theirs._init_optim_state, theirs._load_optim_state_dict = find_out, load


def _check_all_made(optimizer: Optimizer, saved: dict[str, Any], names: dict[Any, set[str]]) -> None:
    """
    Raises:
        ValueError: a full checkpoint has a state that the optimizer has not made yet. PyTorch would not divide it.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        made = optimizer.state.get(parameter, {})
        for name in names[parameter] if isinstance(parameter, DTensor) else ():
            for key, value in saved.get(name, {}).items():
                if key not in made and _tensors(value):
                    raise ValueError(
                        f"optimizer: the checkpoint has {key!r} of {name}, which the optimizer does not make in its "
                        "first step, so that it cannot be divided as the parameter is; let the first step make all "
                        "states, or go on without training.fsdp"
                    )


def _tensors(values: Any) -> list[Tensor]:
    """Those that may be divided."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.ndim]
