"""The gradient scales of residual blocks in the course of a run: numbers, and a chart of depth against step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from composer import Callback, Event, Logger, State
from composer.utils import dist
from matplotlib.figure import Figure

from callbacks.charts import DPI, write_chart, write_json
from callbacks.interval import at_intervals
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling

ROWS = 1024  # of a history, at most


@dataclass
class Row:
    """Some updates, one after another.

    Attributes:
        batch: batches after the last of them.
        updates: how many.
        skipped: how many of them were skipped.
        log2_scales: binary logarithm of each block's scale after the last of them.
        nonfinite: block -> gradients that were not finite; blocks that had none are left out.
    """

    batch: int
    updates: int
    skipped: int
    log2_scales: list[float]
    nonfinite: dict[int, int]

    def then(self, other: Row) -> Row:
        """This and what followed, as one."""
        blocks = sorted(self.nonfinite | other.nonfinite)
        sums = {block: self.nonfinite.get(block, 0) + other.nonfinite.get(block, 0) for block in blocks}
        return Row(other.batch, self.updates + other.updates, self.skipped + other.skipped, other.log2_scales, sums)


@dataclass
class History:
    """What became of the scales, in a bounded number of rows: with too many, two at a time become one.

    Attributes:
        rows: in order.
        stride: updates of a row that is full.
    """

    rows: list[Row] = field(default_factory=list)
    stride: int = 1

    def add(self, row: Row) -> None:
        """Take in an update."""
        if self.rows and self.rows[-1].updates < self.stride:
            self.rows[-1] = self.rows[-1].then(row)
            return
        if len(self.rows) == ROWS:
            self.rows = [one.then(two) for one, two in zip(self.rows[::2], self.rows[1::2], strict=True)]
            self.stride *= 2
        self.rows.append(row)


class GradientScales(Callback):
    """Writes <output>/gradient_scales.json and .png: scale against depth and step, skipped updates and overflows.

    For runs with resblock_grad_scaling. A long run is kept in 1,024 rows at most, each of several updates.
    """

    def __init__(self, output: str, *, every: Duration | None = None) -> None:
        """
        Args:
            every: interval; null: only the end of the run, when both are always written.
        """
        self.path = Path(output, "gradient_scales.png")
        self.due = at_intervals(every)
        self.history = History()
        self.scaling: ResblockGradScaling | None = None
        self.skipped = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        self.scaling = next((a for a in state.algorithms if isinstance(a, ResblockGradScaling)), None)
        if self.scaling is None:
            raise ValueError("gradient_scales: the run has no resblock_grad_scaling, whose scales it draws; add it")
        self.skipped = self.scaling.skipped

    def after_train_batch(self, state: State, logger: Logger) -> None:  # after algorithms
        skipped, self.skipped = self.scaling.skipped - self.skipped, self.scaling.skipped
        nonfinite = {block: count for block, count in enumerate(self.scaling.nonfinite.tolist()) if count}
        log2_scales = [round(exponent, 4) for exponent in self.scaling.scales.exponents.tolist()]
        self.history.add(Row(state.timestamp.batch.value + 1, 1, skipped, log2_scales, nonfinite))

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if self.due(state, event) and dist.get_global_rank() == 0 and self.history.rows:
            write_json(asdict(self.history), self.path.with_suffix(".json"))
            write_chart(scale_chart(self.history), self.path)

    def state_dict(self) -> dict[str, Any]:
        """The history, so that a resumed run's chart is whole."""
        return asdict(self.history)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the history over."""
        self.history = History([Row(**row) for row in state["rows"]], state["stride"])


def scale_chart(history: History) -> Figure:
    """Step against depth: the binary logarithm of each block's scale; overflows as dots, skipped updates above."""
    rows = history.rows
    scales = np.array([row.log2_scales for row in rows])  # (rows, blocks)
    ends = np.array([row.batch for row in rows], dtype=float)
    widths = np.array([row.updates for row in rows], dtype=float)
    edges = np.append(ends[0] - widths[0], ends)
    figure = Figure(figsize=(8, 5), dpi=DPI, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 5])
    top.stairs([row.skipped / row.updates for row in rows], edges, fill=True, color="crimson")
    total = sum(row.skipped for row in rows)
    updates = sum(row.updates for row in rows)
    top.set(ylim=(0, 1), ylabel="skipped")
    top.set_title(f"{total:,} of {updates:,} updates skipped", fontsize="medium")
    mesh = bottom.pcolormesh(edges, np.arange(scales.shape[1] + 1) - 0.5, scales.T, cmap="viridis")
    figure.colorbar(mesh, ax=bottom, label="log2 of the scale")
    places = [(row.batch - row.updates / 2, block) for row in rows for block in row.nonfinite]
    if places:
        bottom.scatter(*zip(*places, strict=True), s=6, color="crimson", linewidths=0, label="overflow")
        bottom.legend(loc="upper left", fontsize="x-small")
    bottom.set(xlabel="update", ylabel="block")
    return figure
