"""Strict loading of weights, from safetensors or from state dicts that hold tensors only."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def load_safetensors(module: nn.Module, file: Path) -> None:
    """Load every tensor of `file` into `module`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such weights; expected a folder that a training run exported")
    load_tensors(module, load_file(file), file)


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Load every one of `tensors` into `module`.

    Args:
        module: the module to load into.
        tensors: its state dict.
        file: the file that they come from, for messages.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    own = module.state_dict()
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{file} does not fit the model: {'; '.join(problems[:3])}{more}")
    module.load_state_dict(tensors)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch file that holds a state dict and nothing else.

    Raises:
        ValueError: a PyTorch file that holds anything else. No code in it is run.
    """
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: holds more than tensors; save its state_dict() instead") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError(f"{file}: holds no tensors by name; save a state_dict()")
    return dict(values)
