"""What encoders must have and return: those of a user's own are checked when they are built and at each batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from data.system.errors import WrongResult

COUNT, NUMBER, TEXT, FUNCTION = "a whole number above 0", "a number", "a text", "a function"  # what attributes are
_KINDS: dict[str, Callable[[Any], bool]] = {
    COUNT: lambda value: type(value) is int and value > 0,
    NUMBER: lambda value: type(value) in (int, float) and math.isfinite(value),
    TEXT: lambda value: isinstance(value, str),
    FUNCTION: callable,
}


def check_attributes(encoder: object, needed: dict[str, str]) -> None:
    """
    Args:
        encoder: an instance that a component has built.
        needed: what its attributes must be, one of the constants of this file, by their names.

    Raises:
        ValueError: an attribute is missing, or of another kind.
    """
    for name, kind in needed.items():
        value = getattr(encoder, name, None)
        if not _KINDS[kind](value):
            problem = f"is {value!r:.60}" if hasattr(encoder, name) else "is missing"
            raise ValueError(
                f"the attribute `{name}` of {type(encoder).__name__} ({type(encoder).__module__}) {problem}; "
                f"set it to {kind}"
            )


def check_result(encoder: object, method: str, found: object, shape: tuple[int, ...], device: torch.device) -> None:
    """
    Args:
        encoder, method: whose result it is.
        found: the result.
        shape: that it must have.
        device: on which it must be.

    Raises:
        WrongResult: it is not a tensor of floating-point numbers of this shape on this device.
    """
    if (
        not isinstance(found, Tensor)
        or found.shape != shape
        or not found.is_floating_point()
        or found.device.type != device.type
    ):
        wanted = f"a tensor {shape} of floating-point numbers on {device.type}"
        raise WrongResult(f"{type(encoder).__name__}.{method}() returns {described(found)} instead of {wanted}")


def described(value: object) -> str:
    """A returned value in a few words: its number format and shape, its length or its class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device.type}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"an instance of {type(value).__name__}"
