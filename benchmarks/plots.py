"""Charts of results."""

from __future__ import annotations

from matplotlib.figure import Figure


def chart() -> Figure:
    """An empty figure in the size of a page's column, for `callbacks.charts.write_chart`."""
    return Figure(figsize=(6.4, 4.0), dpi=110, layout="constrained")
