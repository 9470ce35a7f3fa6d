"""Checkpoints of earlier versions, whose names and shapes of parameters have changed since.

Full ones are converted when they are loaded. Of a sharded one each rank reads its own part by the names of this
version, so it is refused, and `recipes/convert_checkpoint.py` makes a full one of it.

See `recipes.models.legacy_weights` for the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from recipes.models.legacy_weights import part_of, separate_names
from recipes.training.checkpoint_names import REST, conversion


def upgraded(value: Any) -> Any:
    """Values of a checkpoint by the names of this version.

    Weights, averages and errors by the names of parameters, and the optimizer's state and groups, are found wherever
    they are nested.
    """
    if isinstance(value, dict):
        found = {}
        for key, part in value.items():
            names = separate_names(key)
            if names is None:
                found[key] = upgraded(part)
            else:
                found |= {name: _part_of(part, number, len(names)) for number, name in enumerate(names)}
        return found
    if type(value) is tuple:
        return tuple(upgraded(part) for part in value)
    if isinstance(value, list):
        return [new for part in value for new in (separate_names(part) or [upgraded(part)])]
    return value


def check_names(folder: Path, names: Iterable[str]) -> None:
    """
    Args:
        folder: of a sharded checkpoint.
        names: of the values in it.

    Raises:
        ValueError: there are parameters of an earlier version among them.
    """
    if any(separate_names(name) for name in names):
        engine = "lightning" if (folder / REST).is_file() else "composer"
        full = "" if engine == "lightning" else ", and go on from that with training.fsdp.checkpoints=full"
        raise ValueError(
            f"{folder}: a sharded checkpoint of an earlier version, in which parameters have other names; make a full "
            f"one of it by {conversion(folder, engine)}{full}"
        )


def _part_of(value: Any, number: int, parts: int) -> Any:
    """A part of a matrix, bias or scalar, and of the moments that an optimizer keeps of it; other values stay."""
    if isinstance(value, dict):  # of an optimizer, whose steps are scalars for any parameter
        return {n: inner if n == "step" else _part_of(inner, number, parts) for n, inner in value.items()}
    takes_part = isinstance(value, torch.Tensor) and (value.ndim or parts == 1)
    return part_of(value, number, parts) if takes_part else value
