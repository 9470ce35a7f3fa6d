"""Inputs that only their components can look for: sources of pictures and texts, and the encoders of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipes.config.build import asked_for, build, encoder_components
from recipes.config.recipe import Recipe
from recipes.config.values import Component
from recipes.planning.data_checks import local_manifests, unwritten_sets


def absent_inputs(recipe: Recipe, missing: list[str]) -> list[str]:
    """Inputs that are not on this machine, one line each that names its key.

    Args:
        recipe: checked.
        missing: those that the check of its keys has found.

    Raises:
        ValueError: a source that is here and cannot be read.
    """
    lines = [*missing, *unwritten_sets(recipe)]
    for source in _sources([recipe.data, recipe.evals, recipe.callbacks]):
        if any(line.startswith(f"{source.path}.") for line in missing):
            continue
        try:
            build(source)  # which lists its files, and reads no pictures
        except FileNotFoundError as error:
            lines.append(str(error))
    drawing = [label for label, callback in recipe.callbacks.items() if "encoders" in asked_for(callback)]
    training = next(((key, found) for key, found in local_manifests(recipe).items() if key.startswith("data.")), None)
    if drawing and training is not None:
        try:
            encoder_components(training[1])
        except ValueError as error:
            lines.append(f"{training[0]}: {error}; callbacks.{drawing[0]} draws images with it")
    return lines


def _sources(value: Any) -> Iterator[Component]:
    """The sources in the arguments of components; of those within each other, the outermost."""
    if isinstance(value, Component) and value.group == "source":
        yield value
        return
    inner = value.args if isinstance(value, Component) else value
    for item in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
        yield from _sources(item)
