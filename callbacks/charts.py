"""Charts as PNG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from data.system.files import atomic_write

DPI = 90


def write_chart(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, atomically."""
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png")
