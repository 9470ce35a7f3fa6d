"""Finds callbacks, levers, optimizers and loaders whose classes a run cannot use, by the classes alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.data import DataLoader

from data.loading import Loading
from recipes.config.build import import_builder
from recipes.config.recipe import Recipe
from recipes.training.callback import Callback
from recipes.training.hooks import Hooks
from recipes.training.lever import Lever


def check_classes(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: two callbacks of a class of which a run has at most one, or a callback or lever that defines none of
            the methods that a run calls, such as one with a misspelled name.
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


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: its step takes no closure, which Lightning gives to it in the first batch.
    """
    try:
        inspect.signature(optimizer.step).bind(closure=None)
    except TypeError:
        kind = type(optimizer)
        raise ValueError(
            f"optimizer: {kind.__name__}.step ({kind.__module__}) takes no closure; define step(self, closure=None), "
            "which need not call it"
        ) from None


def check_loader(loading: Loading, recipe: Recipe, engine: str) -> None:
    """
    Args:
        loading: training batches.
        recipe: of the run.
        engine: of the run. Composer can also read batches again up to those that it had, of a loader without a state.

    Raises:
        ValueError: the loader is no DataLoader, or checkpoints could not hold its position.
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


def _is_called(kind: type) -> bool:
    base = Lever if issubclass(kind, Lever) else Callback
    methods = [name for name, member in (vars(Hooks) | vars(base)).items() if inspect.isfunction(member)]
    return any(getattr(kind, name, None) is not getattr(base, name) for name in methods if not name.startswith("_"))
