"""Histograms of gradient exponents per block: the tool by which scales and dividers of 16-bit training are chosen.

Ramesh et al. (2021, appendix D) chose the constants that divide gradients, P and Q before they are sent by such plots.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from composer import Callback, Event, Logger, State
from composer.core import Precision
from composer.utils import dist
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callbacks.charts import DPI, write_chart, write_json
from callbacks.exponent_counts import COLUMNS, LEAST, NONFINITE, ZERO, Histograms, count_exponents
from callbacks.interval import at_intervals
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.sixteen_bit.block_scaling import ScaledBranch
from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9

FP16 = {"largest": (65504.0, "-"), "least normal": (2.0**-14, "--"), "least": (2.0**-24, ":")}  # and line styles
LEAST_SHARE = 1e-6  # where the scales of shares begin
NARROW = (MEAN_1_6_9.largest, MEAN_1_6_9.least)


class Exponents(Callback):
    """Writes histograms of floor(log2 |g|) of the gradients of each block's matrices to <output>/exponents.

    Counted is each rank's own gradient, accumulated over the microbatches and divided by its block's scale if it has
    one, before anything else is done to it: it is not averaged with other ranks' (FSDP's is, and a rank counts its
    part), not clipped, and not thrown away where an update is skipped. Counts are added up over all ranks; zeros and
    what is not finite are counted apart. The chart shows what fp16 holds after multiplication with each block's scale,
    and what 1-6-9 holds. The program waits for the device only in batches that are counted.
    """

    def __init__(self, task: nn.Module, output: str, *, every: Duration = "100ba", log2_scale: float = 13.0) -> None:
        """
        Args:
            every: interval; the gradients counted are those of the next batch.
            log2_scale: binary logarithm of the scale that fp16's window is drawn for where blocks have no scale.

        Raises:
            ValueError: a model without blocks.
        """
        block_matrices(task, "exponents")  # asked again when they are sharded
        self.task = task
        self.folder = Path(output, "exponents")
        self.due = at_intervals(every, frozenset({Event.BATCH_START}))
        self.log2_scale = log2_scale
        self.counting = False
        self.counts = torch.empty(0)  # (blocks, COLUMNS) int64
        self.scales = torch.empty(0)  # (blocks,) float32: what gradients are multiplied by when they are counted

    def after_load(self, state: State, logger: Logger) -> None:
        # Before training starts: hooks by which algorithms change gradients are registered then, and run after these.
        matrices = block_matrices(self.task, "exponents")
        device = next(self.task.parameters()).device
        self.counts = torch.zeros(len(matrices), COLUMNS, dtype=torch.int64, device=device)
        self.scales = torch.ones(len(matrices), device=device)
        for number, block in enumerate(matrices):
            for parameter in block:
                parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._count(p, number))

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if event == Event.BATCH_START:
            self.counting = self.due(state, event)

    def before_backward(self, state: State, logger: Logger) -> None:
        if self.counting:  # what is left is the last microbatch's, whose pass sees the sum of all
            self.counts.zero_()
            self.scales.copy_(torch.stack(self._carried(state)))

    def _carried(self, state: State) -> list[Tensor]:
        """The factor in each block's gradients during the backward pass, () float32 each."""
        whole = self.scales.new_tensor(state.scaler.get_scale() if state.precision == Precision.AMP_FP16 else 1.0)
        branches = [getattr(block, "branch", None) for block in self.task.blocks()]
        return [branch.gradient_scale if isinstance(branch, ScaledBranch) else whole for branch in branches]

    @torch.no_grad()
    def _count(self, parameter: Tensor, block: int) -> None:
        if self.counting:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            self.counts[block] += count_exponents(gradient / self.scales[block])

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if not self.counting:
            return
        self.counting = False
        counts = self.counts.clone()
        dist.all_reduce(counts)  # the sum
        names = {id(module): name for name, module in self.task.named_modules()}
        scaled = state.precision == Precision.AMP_FP16 or any(
            isinstance(getattr(block, "branch", None), ScaledBranch) for block in self.task.blocks()
        )
        log2_scales = self.scales.log2().tolist() if scaled else [self.log2_scale] * len(counts)
        found = Histograms([names[id(block)] for block in self.task.blocks()], counts.cpu(), log2_scales)
        logger.log_metrics({f"exponents/{name}": share for name, share in found.shares().items()})
        if dist.get_global_rank() == 0:
            batch = state.timestamp.batch.value
            path = self.folder / f"ba{batch:07d}.png"
            write_json({"batches": batch, "scaled": scaled, **found.record()}, path.with_suffix(".json"))
            write_chart(exponent_chart(found, batch, scaled), path)


def exponent_chart(found: Histograms, batch: int, scaled: bool) -> Figure:
    """Depth against exponent: how many gradients, what fp16 holds under each block's scale, and what 1-6-9 holds.

    Args:
        found: the counts.
        batch: batches before the gradients' one.
        scaled: whether the scales are the run's own.
    """
    counts = found.counts.double().numpy()
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    blocks = len(counts)
    figure = Figure(figsize=(8, 6), dpi=DPI, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    edges = np.arange(blocks + 1) - 0.5
    exponents = np.arange(COLUMNS - 1) + LEAST  # each column's lower edge, and the last one's upper
    drawn = np.ma.masked_equal(shares[:, 1:NONFINITE].T, 0)
    mesh = top.pcolormesh(edges, exponents, drawn, cmap="viridis", norm=LogNorm(LEAST_SHARE, 1))
    figure.colorbar(mesh, ax=top, label="share of the block's gradients")
    scales = np.exp2(np.array(found.log2_scales))
    for name, (value, style) in FP16.items():
        limit = np.log2(value / scales)
        top.stairs(limit, edges, baseline=None, color="crimson", linestyle=style, label=f"fp16 / scale, {name}")
    for number, value in enumerate(NARROW):
        top.axhline(np.log2(value), color="black", linestyle="-.", label=None if number else "1-6-9, largest and least")
    there = exponents[:-1][counts[:, 1:NONFINITE].any(0)]  # that some gradient has
    low = min([-72, *(there - 2)])
    high = max([8, *(there + 2), np.log2(FP16["largest"][0] / scales).max() + 2])
    top.set(ylim=(low, high), ylabel="floor(log2 |g|)")
    note = "scales of the run" if scaled else f"fp16 drawn for a scale of 2^{found.log2_scales[0]:g}"
    top.set_title(f"Gradients of the blocks' matrices after {batch} batches ({note})", fontsize="medium")
    top.legend(loc="lower left", fontsize="x-small", ncols=2)
    for column, color, label in ((ZERO, "grey", "zero"), (NONFINITE, "crimson", "not finite")):
        bottom.stairs(shares[:, column], edges, baseline=LEAST_SHARE, fill=True, color=color, label=label, alpha=0.7)
    bottom.set(yscale="log", ylim=(LEAST_SHARE, 1), ylabel="share", xlabel="block", xlim=(edges[0], edges[-1]))
    bottom.legend(loc="upper left", fontsize="x-small", ncols=2)
    return figure
