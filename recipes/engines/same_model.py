"""Whether a full checkpoint is of the model that is to go on from it. PyTorch compares a sharded one by itself.

Where a full one lacks a weight, PyTorch keeps the model's own, and fails when the optimizer asks for its moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn


def check_weights(path: Path | str, saved: Mapping[str, Iterable[int]], task: nn.Module) -> None:
    """Compare the weights of a checkpoint with those of a model.

    Args:
        path: of the checkpoint.
        saved: the shapes of its weights, by the names that the task has for them.
        task: the model.

    Raises:
        ValueError: names or shapes differ.
    """
    there = {name: str(tuple(shape)) for name, shape in saved.items()}
    here = {name: str(tuple(tensor.shape)) for name, tensor in task.state_dict().items()}
    for name in here | there:
        saved_shape, own_shape = there.get(name, "not there"), here.get(name, "not there")
        if saved_shape != own_shape:
            raise ValueError(
                f"{path}: a checkpoint of another model: {name} is {saved_shape} in it and {own_shape} in the model of "
                "the recipe; go on with the model of its run"
            )
