"""The runs of a comparison, as their folders tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.comparison.events import SAMPLES, Curve, read_curves
from recipes.comparison.pictures import Picture, read_pictures
from recipes.config.differences import differences, value_at
from recipes.config.reading import read_values
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import ConfigError, yaml_line

CONFIG = "config.yaml"  # the resolved config, which a run writes into its folder
TRAINED = "loss/train/"  # begins the names of figures of trained batches
NAMES = ("run_name", "output")  # keys that differ between any two runs


@dataclass(frozen=True)
class Run:
    """A run of a comparison.

    Attributes:
        label: what the page calls it.
        config: a checked `Recipe`, or plain values if it is not one of this version.
        curves: figures over its course, by name.
        pictures: what it has drawn, see `read_pictures`.
    """

    label: str
    config: Any
    curves: dict[str, Curve]
    pictures: dict[str, list[Picture]]

    @property
    def batches(self) -> float:
        """Number of batches that it has trained: a loss is logged with the number of batches before its own."""
        return max(_last(curve) + name.startswith(TRAINED) for name, curve in self.curves.items())

    def position(self, batches: np.ndarray | float, axis: str) -> np.ndarray:
        """Where in the run batches are: the batches themselves, the samples or the hours until then.

        Args:
            batches: (N,), or one.
            axis: "batches", "samples" or "hours".
        """
        counted = self.curves[SAMPLES] if SAMPLES in self.curves else max(self.curves.values(), key=_last)
        if axis == "batches":
            return np.asarray(batches, float)
        if axis == "hours":
            return np.interp(batches, counted.batches, counted.hours)
        size = float(value_at(self.config, "training.global_batch") or 1)
        if SAMPLES not in self.curves:
            return np.asarray(batches, float) * size
        # A run that has not ended has not counted the samples of its last batch.
        return np.interp(batches, counted.batches, counted.values) + size * np.maximum(0, batches - _last(counted))


def _last(curve: Curve) -> float:
    return float(curve.batches[-1])


def read_runs(folders: list[Path], most: int, side: int) -> list[Run]:
    """The runs in some folders.

    Args:
        folders: of the runs.
        most, side: see `read_pictures`.

    Raises:
        FileNotFoundError: a folder is not a run's.
        ValueError: a run has logged nothing, a config is not readable, or the runs are of different kinds.
    """
    twice = [folder for number, folder in enumerate(folders) if folder in folders[:number]]
    if twice:
        raise ValueError(f"{twice[0]}: given twice; name each run once")
    values = [_read_config(folder) for folder in folders]
    kinds = [str(value_at(config, "model.name")) for config in values]
    for folder, kind in zip(folders, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"runs of different kinds: {folders[0]} trains a model {kinds[0]}, {folder} a model {kind}; compare "
                "runs of one kind"
            )
    names = [str(value_at(config, "run_name")) for config in values]
    labels = [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]
    recipes = [_checked(folder) for folder in folders]
    if None in recipes:  # written by another version: all as they are written
        recipes = values
    runs = []
    for folder, label, config, recipe in zip(folders, labels, values, recipes, strict=True):
        curves = read_curves(folder / "tensorboard")
        if not curves:
            raise ValueError(f"{folder}: no figures in {folder / 'tensorboard'}; train with the logger tensorboard")
        counted = [curves[SAMPLES]] if SAMPLES in curves else curves.values()
        end = max(map(_last, counted)) + 1  # a batch is logged with the number of batches before it
        runs.append(Run(label, recipe, curves, read_pictures(folder, config, most, side, end)))
    return runs


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: not a run, it has no {CONFIG}; give runs/<run_name>")
    try:
        values = read_values(folder / CONFIG, [])
    except ConfigError as error:
        raise ValueError(error.lines[0]) from None
    if value_at(values, "model.name") is None:
        raise ValueError(f"{folder / CONFIG}: names no model, so it is not the one that a run wrote; copy it again")
    return values


def _checked(folder: Path) -> Recipe | None:
    try:
        return load_config(folder / CONFIG, [], Recipe, missing=[])
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # of the disk, which has given it before
            raise
        return None


def differing_keys(runs: list[Run]) -> Iterator[tuple[str, list[str]]]:
    """(key, each run's value as YAML on one line) for the keys of the configs that are not the same in all runs."""
    paths: dict[str, None] = {}
    for other in runs[1:]:
        paths |= {path: None for path, _, _ in differences(runs[0].config, other.config) if path not in NAMES}
    for path in paths:
        yield path, [yaml_line(value_at(run.config, path)) for run in runs]
