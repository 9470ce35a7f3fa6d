"""Line charts as inline SVG: one line per run, over one of the axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 380, 220  # of a chart, in units of its view box
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 26  # margins around the lines
POINTS = 240  # of a line; more are averaged
MARKED = 24  # lines of up to this many points show them
WIDE_RANGE = 5  # from this ratio of the largest to the smallest value on, the vertical axis is logarithmic


@dataclass(frozen=True)
class Line:
    """A run's line in a chart.

    Attributes:
        number: of the run, which decides colour and dashes.
        label: name of the run.
        x, y: (N,), x increasing; values that are not finite are left out.
    """

    number: int
    label: str
    x: np.ndarray
    y: np.ndarray


def averaged(line: Line, points: int = POINTS) -> Line:
    """A line of at most `points` points, each the mean of as many neighbours; values that are not finite are left out.

    The last point is the last value's group, so that a line ends where its run ends.
    """
    finite = np.isfinite(line.y) & np.isfinite(line.x)
    x, y = line.x[finite], line.y[finite]
    if len(x) > points:
        groups = np.array_split(np.arange(len(x)), points)
        x, y = (np.array([values[group].mean() for group in groups]) for values in (x, y))
    return Line(line.number, line.label, x, y)


def line_chart(title: str, lines: Sequence[Line], x_title: str) -> str:
    """An SVG of lines; its text alternative names the last value of each.

    Args:
        title: name of the figure.
        lines: at least one with a finite value.
        x_title: what the horizontal axis counts.
    """
    lines = [line for line in map(averaged, lines) if len(line.x)]
    x, y = (np.concatenate([getattr(line, name) for line in lines]) for name in ("x", "y"))
    logarithmic = bool(y.min() > 0 and y.max() / y.min() >= WIDE_RANGE)
    x_ticks = ticks(0.0, float(x.max()))
    y_ticks = log_ticks(y) if logarithmic else ticks(float(y.min()), float(y.max()))
    low, high = min(y_ticks[0], y.min()), max(y_ticks[-1], y.max())
    scale = math.log if logarithmic else float

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / (max(x_ticks[-1], float(x.max())) or 1)

    def down(value: float) -> float:
        share = (scale(value) - scale(low)) / ((scale(high) - scale(low)) or 1)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    ends = "; ".join(f"{line.label} ends at {line.y[-1]:.4g}" for line in lines)
    said = f"{title} against {x_title}{', logarithmic' if logarithmic else ''}: {ends}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(said)}">']
    for value in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {down(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{down(value) + 3.5:.1f}" class="left">{number(value)}</text>')
    for value in x_ticks:
        parts.append(f'<text x="{across(value):.1f}" y="{HEIGHT - 9}" class="below">{number(value)}</text>')
    for line in lines:
        points = [f"{across(a):.1f} {down(b):.1f}" for a, b in zip(line.x, line.y, strict=True)]
        kind = f"run{line.number % 8}"
        tip = f"<title>{escape(line.label)}</title>"
        if len(points) > 1:
            parts.append(f'<path class="line {kind}" d="M{"L".join(points)}">{tip}</path>')
        if len(points) <= MARKED:
            marks = (point.split() for point in points)
            parts += [f'<circle class="{kind}" cx="{a}" cy="{b}" r="2.5">{tip}</circle>' for a, b in marks]
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten, from the last below `low` to the last below `high`."""
    if not high > low:
        low, high = (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = min(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]  # 0.3, not 0.30000000000000004


def log_ticks(values: np.ndarray) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there are few, from the last one below all values upwards."""
    first, last = (math.floor(math.log10(value)) for value in (values.min(), values.max()))
    factors = (1, 2, 5) if last - first < 3 else (1,)
    every = max(1, (last - first) // 5)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    below = [value for value in found if value <= values.min()]
    return [value for value in found if below[-1:] <= [value] and value <= values.max()]


def number(value: float) -> str:
    """A number of at most six letters, such as 0.05, 2.5k or 1e-9."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= size < 1e12:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
