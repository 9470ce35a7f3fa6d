"""The JSON files of exports, which are passed on, so that nobody vouches for them. Importable without PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from data.system import files


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of an export.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a JSON object.
    """
    try:
        return files.read_object(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file; expected a folder that a training run exported") from None
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON object ({error})") from None


def object_in(values: dict[str, Any], name: str, file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object inside of that of open_clip's config. Without a default it must be there.

    Raises:
        ValueError: it is not there, or no object.
    """
    found = values.get(name, default)
    if not isinstance(found, dict):
        raise ValueError(f"{file}: no object `{name}`; expected a folder in open_clip's format")
    return found


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
