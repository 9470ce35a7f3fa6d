"""Finds callbacks and levers whose classes a run cannot use, by the classes alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from recipes.config.build import import_builder
from recipes.config.recipe import Recipe
from recipes.engines.checkpoints.conversion import OF_COMPOSER
from recipes.training.callback import Callback
from recipes.training.hooks import Hooks
from recipes.training.lever import Lever

# Classes whose states are beside those of the recipe in checkpoints of Composer: the engine's, and Composer's loggers.
OF_ENGINE = {*OF_COMPOSER, "RunLevers", "ProgressBarLogger", "ConsoleLogger"}
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


def check_names(levers: Iterable[Lever], callbacks: Mapping[str, Callback]) -> None:
    """
    Args:
        levers: of the recipe.
        callbacks: by label.

    Raises:
        ValueError: a class has the name of one of the engine composer. Checkpoints hold states by these
            names: of two with the same one, only the last is saved, and loaded into both. Conversions leave it out.
    """
    labelled = [(f"algorithms.{lever.label_in_recipe}", lever) for lever in levers]
    labelled += [(f"callbacks.{label}", callback) for label, callback in callbacks.items()]
    for path, hooks in labelled:
        name = type(hooks).__name__
        if name in OF_ENGINE:
            raise ValueError(
                f"{path}: the class {name} ({type(hooks).__module__}) has the name of one of the engine's, by which "
                "checkpoints hold states; give it another name"
            )


def _is_called(kind: type) -> bool:
    base = Lever if issubclass(kind, Lever) else Callback
    methods = [name for name, member in (vars(Hooks) | vars(base)).items() if inspect.isfunction(member)]
    return any(getattr(kind, name, None) is not getattr(base, name) for name in methods if not name.startswith("_"))
