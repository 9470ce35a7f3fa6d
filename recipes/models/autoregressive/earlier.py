"""Weights of versions in which queries, keys and values were rows of one matrix."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

STACKED = re.compile(r"(.*\bbranch\.)qkv\.(weight|bias)")


def separate_names(name: Any) -> list[str] | None:
    """The names of a stacked parameter's three parts; None: it is not a stacked one."""
    match = STACKED.fullmatch(name) if isinstance(name, str) else None
    return None if match is None else [f"{match[1]}{letter}.{match[2]}" for letter in "qkv"]


def third(tensor: Tensor, number: int) -> Tensor:
    """The rows of queries (0), keys (1) or values (2), in memory of their own."""
    return tensor.chunk(3)[number].clone()


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A network's tensors with three matrices in the place of each stacked one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = separate_names(name)
        found |= {name: tensor} if names is None else {new: third(tensor, i) for i, new in enumerate(names)}
    return found
