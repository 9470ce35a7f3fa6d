"""Strict loading of weights from safetensors."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import nn


def load_safetensors(module: nn.Module, file: Path) -> None:
    """Load every tensor of `file` into `module`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a tensor is missing, is left over, or has another shape.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such weights; expected a folder that a training run exported")
    tensors = load_file(file)
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
