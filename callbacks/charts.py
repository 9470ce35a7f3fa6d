"""Charts and numbers as files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DPI = 90


def write_chart(figure: Figure, path: Path) -> None:
    """Write a PNG under a temporary name, then rename it."""
    _write(path, lambda partial: figure.savefig(partial, format="png"))


def write_json(record: dict[str, Any], path: Path) -> None:
    """Write JSON under a temporary name, then rename it."""
    _write(path, lambda partial: partial.write_text(json.dumps(record) + "\n", encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    write(partial)
    partial.replace(path)
