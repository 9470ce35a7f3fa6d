"""Finds optimizers of one's own with which a run, or one that goes on from its checkpoints, would go wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from data.system.errors import one_line
from recipes.engines.checkpoints.own_optimizers import is_own
from recipes.engines.checkpoints.plain_pickles import loadable


def check_step(optimizer: torch.optim.Optimizer, on_cpu: bool) -> None:
    """
    Args:
        optimizer: of the run.
        on_cpu: whether the run is on a CPU.

    Raises:
        ValueError: its step takes no closure, or zero_grad no set_to_none, which PyTorch gives to them when a run goes
            on; its step needs a closure; it exchanges weights for validation; or it has an option of PyTorch's
            optimizers with which they could not make a step.
    """
    kind, step = type(optimizer), inspect.signature(optimizer.step)
    try:
        step.bind(closure=None)
    except TypeError:
        raise ValueError(
            f"optimizer: {kind.__name__}.step ({kind.__module__}) takes no closure; define step(self, closure=None), "
            "which need not call it"
        ) from None
    try:
        step.bind()
    except TypeError:
        raise ValueError(
            f"optimizer: {kind.__name__}.step ({kind.__module__}) needs a closure, and a run gives it none: gradients "
            "are ready when it is called; use an optimizer that needs none"
        ) from None
    try:
        inspect.signature(optimizer.zero_grad).bind(set_to_none=True)
    except TypeError:
        raise ValueError(
            f"optimizer: {kind.__name__}.zero_grad ({kind.__module__}) takes no set_to_none, which PyTorch gives to it "
            "when a run goes on; define zero_grad(self, set_to_none=True)"
        ) from None
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"optimizer: {kind.__name__} ({kind.__module__}) has train() and eval(), which a run does not call: "
            "validation, checkpoints and exports would have the weights of training; use another optimizer, and "
            "algorithms.scheduled_ema for averages"
        )
    if is_own(optimizer):
        return
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {kind.__name__} has differentiable=True, which no weights can be trained with; remove it"
        )
    if on_cpu and any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {kind.__name__} has capturable=True, which is for GPUs, and this run is on a CPU; remove it"
        )


def check_kept(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], saved: bool, divided: bool = False
) -> None:
    """
    Args:
        optimizer: of the run.
        trained: the parameters that it was given, by their names in the model.
        saved: whether the run saves or loads checkpoints, which hold `state` and `param_groups` of an optimizer.
        divided: whether each rank holds a part of the model only.

    Raises:
        ValueError: it updates parts of parameters in another way than whole ones, lacks a trained parameter, or has
            what checkpoints would not hold.
    """
    kind = type(optimizer)
    if divided and isinstance(optimizer, torch.optim.Adafactor):  # it squares norms of columns before they are added up
        raise ValueError(
            f"optimizer: {kind.__name__} of PyTorch makes other updates of sharded parameters than of whole ones; "
            "remove training.fsdp and training.tensor_parallel, or use another optimizer"
        )
    if missing := _left_out(optimizer, trained):
        raise ValueError(
            f"optimizer: {kind.__name__} leaves out {missing}, which would not be trained; give it all parameters, or "
            "freeze these in the model by requires_grad_(False)"
        )
    if not saved:
        return
    empty = [str(number) for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if len(empty) > 1:  # PyTorch tells one from the others
        raise ValueError(
            f"optimizer: {kind.__name__} has groups without parameters ({', '.join(empty)}), and no run could go on "
            "from a checkpoint; leave them out"
        )
    try:
        state = optimizer.state_dict()
    except RuntimeError as error:
        raise ValueError(
            f"optimizer: {kind.__name__}.state_dict ({kind.__module__}) fails, and checkpoints need it on every rank: "
            f"{one_line(error)}; divide the state by training.fsdp instead, or set checkpoints.save=false"
        ) from error
    other = [key for key in state if key not in ("state", "param_groups")]
    if other:
        raise ValueError(
            f"optimizer: {kind.__name__}.state_dict ({kind.__module__}) has {other[0]!r}, and checkpoints hold "
            "state and param_groups alone; keep it in one of these"
        )
    for name, value in vars(optimizer).items():
        parts = value if isinstance(value, list) else [value]
        apart = any(isinstance(part, torch.optim.Optimizer) and part.state is not optimizer.state for part in parts)
        if apart and _has_plain_state(optimizer):
            raise ValueError(
                f"optimizer: {kind.__name__} ({kind.__module__}) keeps the state of its {name} apart, and checkpoints "
                "would not hold it; let both have one `state`"
            )
    loadable(f"optimizer: {kind.__name__}", {"groups": _options(optimizer)})
    if _has_plain_state(optimizer):
        _check_keys(optimizer)


def check_first_step(optimizer: torch.optim.Optimizer, task: nn.Module, saved: bool) -> None:
    """Let the first step of an optimizer end in an error where a run would go wrong by what only this step shows.

    Args:
        optimizer: of the run.
        task: its model.
        saved: whether the run saves or loads checkpoints.
    """
    told = False

    def first_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """
        Raises:
            ValueError: the first batch has made a parameter, or the optimizer a state that checkpoints cannot hold.
        """
        nonlocal told
        if told:
            return
        told = True
        trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
        if missing := _left_out(optimizer, trained):
            raise ValueError(
                f"model: {missing}: made in the first batch, so that the optimizer does not have it; make all "
                "parameters in the constructor"
            )
        if saved:
            found = optimizer.state
            if _has_plain_state(optimizer):
                _check_keys(optimizer)
            else:  # one of its own may leave out what can be computed again
                found = optimizer.state_dict()["state"]
            states = [dict(state) for state in found.values()]
            loadable(f"optimizer: {type(optimizer).__name__}", {"state": states, "groups": _options(optimizer)})

    first_step.only_looks = True  # see `own_optimizers.is_own`
    optimizer.register_step_post_hook(first_step)


def _has_plain_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether checkpoints hold all of `state`, as those of PyTorch's optimizers do."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _left_out(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """The trained parameters that an optimizer does not have, in words; empty if there are none."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in trained.items() if id(parameter) not in known]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0]}{more}" if missing else ""


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: it keeps a state of what no group has, which PyTorch can neither name nor save.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            kind, what = type(optimizer), "a tensor" if isinstance(key, torch.Tensor) else repr(key)
            raise ValueError(
                f"optimizer: {kind.__name__} ({kind.__module__}) has a state of {what}, which is no parameter of its "
                "groups, and checkpoints cannot hold it; keep it in a group, or in the state of a parameter"
            )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
