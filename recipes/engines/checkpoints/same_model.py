"""What a checkpoint is of: its model and its optimizer, which must be those of the run that goes on from it.

Where a full one lacks a weight, PyTorch keeps the model's own, and fails when the optimizer asks for its moments. Of a
sharded one it reads the parameters that the model has, and leaves others out. Composer leaves out the state of another
optimizer.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from recipes.engines.checkpoints.batch_marks import check_one_batch
from recipes.engines.checkpoints.conversion import PREFIX
from recipes.engines.checkpoints.legacy import check_names, upgraded
from recipes.engines.checkpoints.plain_pickles import NOT_WHOLE, damaged, load_plain, plain_metadata
from recipes.engines.checkpoints.sharded_files import METADATA
from recipes.engines.lightning.checkpoint_format import read_file
from recipes.training.checkpoint_names import REST, conversion

# Where they are in a checkpoint: weights by engine, and Composer's optimizers, by their classes.
WEIGHTS = {"composer": ("state", "model"), "lightning": ("weights",)}
OPTIMIZERS = ("state", "optimizers")
PREFIXES = {"composer": PREFIX, "lightning": ""}  # of their names; a model may have an attribute of the same name


@dataclass(frozen=True)
class Saved:
    """What a checkpoint is of.

    Attributes:
        path: of the checkpoint, for messages.
        shapes: of its weights, by the names that the task has for them.
        optimizer: class of its optimizer.
    """

    path: Path | str
    shapes: Mapping[str, Iterable[int]]
    optimizer: str

    def check(self, task: nn.Module, optimizer: str) -> None:
        """Compare it with what a run has.

        Args:
            task: the model, on any device.
            optimizer: class of the optimizer.

        Raises:
            ValueError: names or shapes of weights differ, or the optimizer does.
        """
        # Composer names a class with the function that has made it.
        if self.optimizer.rpartition(".")[2] != optimizer:
            raise ValueError(
                f"{self.path}: holds the state of {self.optimizer}, the recipe's optimizer is {optimizer}; to go "
                f"on with its weights alone, export them with `python recipes/export.py {shlex.quote(str(self.path))} "
                "FOLDER --weights raw`, and begin a run with another output and checkpoints.load_weights=FOLDER"
            )
        there = {name: str(tuple(shape)) for name, shape in self.shapes.items()}
        here = {name: str(tuple(tensor.shape)) for name, tensor in task.state_dict().items()}
        for name in here | there:
            saved_shape, own_shape = there.get(name, "not there"), here.get(name, "not there")
            if saved_shape != own_shape:
                raise ValueError(
                    f"{self.path}: a checkpoint of another model: {name} is {saved_shape} in it and {own_shape} in the "
                    "model of the recipe; go on with the model of its run"
                )


def saved_at(path: Path, engine: str) -> Saved:
    """What a checkpoint on a disk is of, without reading its tensors.

    Args:
        path: a file, or the folder of a sharded checkpoint.
        engine: that is to go on from it.

    Raises:
        FileNotFoundError: it lacks a file.
        ValueError: the other engine or an earlier version wrote it, or it is damaged.
    """
    with damaged(f"{path}: {NOT_WHOLE}"):
        return _saved_at(path, engine)


def _saved_at(path: Path, engine: str) -> Saved:
    if not path.is_dir():
        state = read_file(path, lazily=True) if engine == "lightning" else load_plain(path, lazily=True)
        return saved_in(path, upgraded(state), engine)
    metadata = plain_metadata(path / METADATA)
    check_names(path, metadata.state_dict_metadata)
    check_one_batch(path, metadata)
    place = WEIGHTS[engine]
    shapes = {
        where[-1].removeprefix(PREFIXES[engine]): metadata.state_dict_metadata[name].size
        for name, where in metadata.planner_data.items()
        if where[: len(place)] == place
    }
    if not shapes:
        raise _of_the_other(path, engine)
    if engine == "lightning":
        return Saved(path, shapes, read_file(path / REST, lazily=True)["optimizer_name"])
    return Saved(path, shapes, next(where[2] for where in metadata.planner_data.values() if where[:2] == OPTIMIZERS))


def saved_in(path: Path | str, state: Any, engine: str) -> Saved:
    """What a full checkpoint is of.

    Args:
        path: of the checkpoint, for messages.
        state: its contents, by the names of this version.
        engine: that is to go on from it.

    Raises:
        ValueError: the other engine wrote it.
    """
    match engine, state:
        case "composer", {"state": {"model": dict() as weights, "optimizers": dict() as optimizers}}:
            (optimizer,) = optimizers
        case "lightning", {"weights": dict() as weights, "optimizer_name": optimizer}:
            pass
        case _:
            raise _of_the_other(path, engine)
    shapes = {name.removeprefix(PREFIXES[engine]): tensor.shape for name, tensor in weights.items()}
    return Saved(path, shapes, optimizer)


def _of_the_other(path: Path | str, engine: str) -> ValueError:
    return ValueError(
        f"{path}: not a checkpoint of the engine {engine}; one of the other engine is converted by "
        f"{conversion(path, engine)} into one beside it; give that"
    )
