"""Charts of results."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure


def chart() -> Figure:
    """An empty one, of a size that a page shows."""
    return pyplot.figure(figsize=(6.4, 4.0), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG and let go of the figure."""
    partial = path.with_name(f".{os.getpid()}{path.name}")
    figure.savefig(partial, dpi=110)
    pyplot.close(figure)
    partial.replace(path)
