"""Finds callbacks, levers, optimizers and loaders whose classes a run cannot use, by the classes alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from data.loading import Loading
from recipes.config.build import import_builder
from recipes.config.recipe import Recipe
from recipes.engines.checkpoints.plain_pickles import loadable
from recipes.training.callback import Callback
from recipes.training.hooks import Hooks
from recipes.training.lever import Lever
from recipes.training.ranks import world_size

# Methods of levers or callbacks, which nothing calls in the other ones: name, group where it is wrong, and whose it is.
OF_CALLBACKS = [(name, "algorithm", "callbacks") for name in ("gradients_ready", "after_save")]
OF_LEVERS = [
    (name, "callback", "levers")
    for name in ("change_modules", "unscale_gradients", "average_gradients", "clip_gradients", "before_step")
]


def check_classes(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: two callbacks of a class of which a run has at most one, or a callback or lever that defines none of
            the methods that a run calls, such as one with a misspelled name, or one that it calls for the other ones.
    """
    found: dict[Any, str] = {}
    for label, component in recipe.callbacks.items():
        first = found.setdefault(import_builder(component), label)
        if first != label and getattr(import_builder(component), "alone", False):
            raise ValueError(
                f"callbacks: {first} and {label} are both {component.name}, and what one writes would replace what the "
                "other does; remove one of them"
            )
    for component in (*recipe.callbacks.values(), *recipe.algorithms.values()):
        kind = import_builder(component)
        if isinstance(kind, type) and not _is_called(kind):
            raise ValueError(
                f"{component.path}: {kind.__name__} ({kind.__module__}) does nothing: it defines none of the methods "
                "that a run calls, such as step_end(run)"
            )
        for name, group, others in (*OF_CALLBACKS, *OF_LEVERS) if isinstance(kind, type) else ():
            if component.group == group and getattr(kind, name, None) is not getattr(Hooks, name, None):
                raise ValueError(
                    f"{component.path}: {kind.__name__} ({kind.__module__}) defines {name}, which a run calls for "
                    f"{others} alone; give it another name, or make a class of {others} of it"
                )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: its step takes no closure, or zero_grad no set_to_none, which PyTorch gives to them when a run goes
            on; its step needs a closure; or it exchanges weights for validation.
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
    other = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
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


def check_loader(loading: Loading, recipe: Recipe, engine: str) -> None:
    """
    Args:
        loading: training batches.
        recipe: of the run.
        engine: of the run. Composer can also read batches again up to those that it had, of a loader without a state.

    Raises:
        ValueError: the loader is no DataLoader, checkpoints could not hold its position, or Composer would refuse it.
    """
    name, checkpoints = recipe.data.name, recipe.checkpoints
    loader = loading.loader
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data: the loader of {name} is an instance of {type(loader).__name__}; give a DataLoader")
    kept = engine == "lightning" and (checkpoints.save or checkpoints.load_path is not None)
    if kept and not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise ValueError(
            f"data: the loader of {name} has no state_dict and load_state_dict, which checkpoints need; define them in "
            "a subclass of DataLoader (data/loading.py)"
        )
    if engine != "composer" or hasattr(loader, "state_dict"):
        return
    if hasattr(loader.dataset, "state_dict") and not takes_counts(loader.dataset) and checkpoints.save:
        raise ValueError(
            f"data: state_dict of {type(loader.dataset).__name__} ({name}) does not take num_samples and "
            "from_beginning, which Composer gives; define state_dict and load_state_dict in a subclass of DataLoader "
            "(data/loading.py)"
        )
    samplers = (loader.sampler, loader.batch_sampler)
    divides = isinstance(loader.dataset, IterableDataset) or any(isinstance(s, DistributedSampler) for s in samplers)
    if world_size() > 1 and not divides:
        raise ValueError(
            f"data: the loader of {name} has no state_dict and load_state_dict, and Composer cannot see that its ranks "
            "read different samples; define them in a subclass of DataLoader (data/loading.py)"
        )


def takes_counts(dataset: Dataset) -> bool:
    """Whether a data set has a position as Composer asks for it, as those of streaming do."""
    try:
        inspect.signature(dataset.state_dict).bind(0, True)
    except (AttributeError, TypeError):
        return False
    return True


def _is_called(kind: type) -> bool:
    base = Lever if issubclass(kind, Lever) else Callback
    methods = [name for name, member in (vars(Hooks) | vars(base)).items() if inspect.isfunction(member)]
    return any(getattr(kind, name, None) is not getattr(base, name) for name in methods if not name.startswith("_"))
