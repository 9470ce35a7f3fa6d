"""The encoded sets and other inputs of a recipe: which are on this machine, and which are missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from data.encoded.text_manifest import NAME as TEXT_MANIFEST
from recipes.config.build import asked_for, build, encoder_components
from recipes.config.recipe import Recipe
from recipes.config.values import Component


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


def unwritten_sets(recipe: Recipe) -> Iterator[str]:
    """Local sets whose folder is here, but no manifest, which is written last: one line each that names its key."""
    for label, data in data_of(recipe):
        manifest = TEXT_MANIFEST if data.name == "texts" else MANIFEST
        for name, stream in (data.args.get("streams") or {}).items():
            folder = stream.args.get("path")
            if folder and Path(folder).exists() and not Path(folder, manifest).is_file():
                sets = sorted(str(file.parent) for file in Path(folder).glob(f"*/{manifest}"))
                todo = f"give {sets[0]}" if sets else "write the set first, with precompute/encode.py or pack.py"
                yield f"{label}.streams.{name}.path: `{folder}` has no {manifest}; {todo}"


def local_manifests(recipe: Recipe) -> dict[str, Manifest]:
    """The manifests of the recipe's encoded sets that are on this machine, by the keys of their streams."""
    found = {}
    for key, stream in streams_of(recipe):
        folder = folder_of(stream)
        if folder is not None and (folder / MANIFEST).is_file():
            found[key] = Manifest.read(folder)
    return found


def folder_of(stream: Component) -> Path | None:
    """The folder of a set on this machine, or of its copy if it is remote."""
    folder = stream.args.get("path") or stream.args.get("cache")
    return Path(folder) if folder else None


def data_of(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    """The training data and those of validation, by their keys."""
    yield "data", recipe.data
    yield from ((f"evals.{label}", component) for label, component in recipe.evals.items())


def streams_of(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    """The encoded sets of all data, by their keys."""
    for label, data in data_of(recipe):
        for name, stream in (data.args.get("streams") or {}).items():
            yield f"{label}.streams.{name}", stream
