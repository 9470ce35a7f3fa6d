"""What OmegaConf makes of the values of a config: interpolations replaced, and a plain copy of everything else.

A copy is made here, since OmegaConf takes ten times as long for it, which was most of the time in which a config is
read. Whatever it may change or refuse, it gets.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

DEPTH = 20  # deeper values are OmegaConf's: it says which ones are too deep
NAMES = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*", re.ASCII)
REFERENCE = re.compile(rf"\$\{{({NAMES.pattern})\}}", re.ASCII)


def checked(values: Any) -> Any:
    """A copy of values, in which interpolations stay. Raises OmegaConfBaseException for what is none of a config."""
    copy = _copy(values, resolve=False)
    return OmegaConf.to_container(OmegaConf.create(values), resolve=False) if copy is None else copy


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """A copy with interpolations resolved. Raises OmegaConfBaseException where that cannot be done."""
    copy = _copy(values, resolve=True)
    return OmegaConf.to_container(OmegaConf.create(values), resolve=True) if copy is None else copy


def nested(key: str, value: Any) -> dict[str, Any]:
    """("a.b", 1) -> {"a": {"b": 1}}. Raises OmegaConfBaseException for a key or a value that cannot be."""
    if NAMES.fullmatch(key):
        values = value
        for name in reversed(key.split(".")):
            values = {name: values}
        if (copy := _copy(values, resolve=False)) is not None:
            return copy
    given = OmegaConf.create()
    OmegaConf.update(given, key, value)
    return OmegaConf.to_container(given, resolve=False)


def _copy(values: Any, resolve: bool) -> dict[str, Any] | None:
    """A copy; None where OmegaConf may refuse something, or make something else of it."""

    def copied(value: Any, depth: int) -> Any:
        if isinstance(value, dict) and depth and all(type(key) is str for key in value):
            return {key: copied(item, depth - 1) for key, item in value.items()}
        if isinstance(value, list) and depth:
            return [copied(item, depth - 1) for item in value]
        if isinstance(value, str) and "${" in value and not resolve:
            OmegaConf.create([value])  # which refuses what is no interpolation
            return value
        if isinstance(value, str) and depth and (reference := REFERENCE.fullmatch(value)):
            found = values
            for name in reference[1].split("."):
                found = found[name]
            return copied(found, depth - 1)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str) and "${" not in value and value != "???":
            return value
        raise ValueError

    try:
        return copied(values, DEPTH) if isinstance(values, dict) else None
    except (LookupError, TypeError, ValueError, OmegaConfBaseException):
        return None
