"""The gradient scales of residual blocks in the course of a run, as numbers and as a chart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from callbacks.charts import DPI, write_chart
from data.aliases import Duration
from data.system.files import write_json
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.training.callback import PeriodicCallback
from recipes.training.ranks import is_first_rank
from recipes.training.run import Run

ROWS = 1024  # at most, in a history


@dataclass
class Row:
    """One or more consecutive updates.

    Attributes:
        batch: number of batches after the last update.
        updates: number of updates.
        skipped: number of updates that were skipped.
        log2_scales: binary logarithm of each block's scale after the last update.
        nonfinite: block -> number of gradients that were not finite; blocks without any are left out.
    """

    batch: int
    updates: int
    skipped: int
    log2_scales: list[float]
    nonfinite: dict[int, int]

    def then(self, other: Row) -> Row:
        """This row and the following one merged into one."""
        blocks = sorted(self.nonfinite | other.nonfinite)
        sums = {block: self.nonfinite.get(block, 0) + other.nonfinite.get(block, 0) for block in blocks}
        return Row(other.batch, self.updates + other.updates, self.skipped + other.skipped, other.log2_scales, sums)


@dataclass
class History:
    """The scales over a run in a bounded number of rows: when they become too many, pairs of rows are merged.

    Attributes:
        rows: in order.
        stride: number of updates per complete row.
    """

    rows: list[Row] = field(default_factory=list)
    stride: int = 1

    def add(self, row: Row) -> None:
        """Append one update."""
        if self.rows and self.rows[-1].updates < self.stride:
            self.rows[-1] = self.rows[-1].then(row)
            return
        if len(self.rows) == ROWS:
            self.rows = [one.then(two) for one, two in zip(self.rows[::2], self.rows[1::2], strict=True)]
            self.stride *= 2
        self.rows.append(row)


class GradientScales(PeriodicCallback):
    """Writes <output>/gradient_scales.json and .png: each block's scale per update, skipped updates and overflows.

    For runs with resblock_grad_scaling. A long run is stored in at most 1,024 rows, each of several updates.
    """

    alone = True

    def __init__(self, output: str, scaling: ResblockGradScaling | None, *, every: Duration | None = None) -> None:
        """
        Args:
            every: interval; null: only at the end of the run, when both files are always written.

        Raises:
            ValueError: the run has no resblock_grad_scaling.
        """
        super().__init__(every)
        if scaling is None:
            raise ValueError("gradient_scales: the run has no resblock_grad_scaling, whose scales it draws; add it")
        self.scaling = scaling
        self.path = Path(output, "gradient_scales.png")
        self.history = History()
        self.skipped = 0

    def begin(self, run: Run) -> None:
        self.skipped = self.scaling.skipped

    def gradients_ready(self, run: Run) -> None:
        skipped, self.skipped = self.scaling.skipped - self.skipped, self.scaling.skipped
        nonfinite = {block: count for block, count in enumerate(self.scaling.nonfinite.tolist()) if count}
        log2_scales = [round(exponent, 4) for exponent in self.scaling.scales.exponents.tolist()]
        self.history.add(Row(run.clock.batch + 1, 1, skipped, log2_scales, nonfinite))

    def act(self, run: Run) -> None:
        if is_first_rank() and self.history.rows:
            write_json(self.path.with_suffix(".json"), asdict(self.history))
            write_chart(scale_chart(self.history), self.path)

    def state_dict(self) -> dict[str, Any]:
        """The history, so that the chart of a resumed run begins with the first batch."""
        return asdict(self.history)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the history of a checkpoint."""
        self.history = History([Row(**row) for row in state["rows"]], state["stride"])


def scale_chart(history: History) -> Figure:
    """The binary logarithm of each block's scale (vertical) per update, overflows as dots, skipped updates above."""
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
