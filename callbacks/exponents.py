"""Histograms of gradient exponents per block, by which scales and divisors of 16-bit training are chosen.

Ramesh et al. (2021, appendix D) used such plots to choose the constants by which gradients, and PowerSGD's factors P
and Q, are divided before they are sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.charts import DPI, write_chart
from callbacks.exponent_counts import COLUMNS, LEAST, NONFINITE, ZERO, Histograms, count_exponents
from data.aliases import Duration
from data.system.files import write_json
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.sharding.shards import own
from recipes.algorithms.sixteen_bit.block_scaling import ScaledBranch
from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9
from recipes.models.task import Task
from recipes.training import ranks
from recipes.training.callback import PeriodicCallback
from recipes.training.run import Run

FP16 = {"largest": (65504.0, "-"), "least normal": (2.0**-14, "--"), "least": (2.0**-24, ":")}  # and line styles
LEAST_SHARE = 1e-6  # lower end of the axes of shares
NARROW = (MEAN_1_6_9.largest, MEAN_1_6_9.least)


class Exponents(PeriodicCallback):
    """Writes histograms of floor(log2 |g|) of the gradients of each block's matrices to <output>/exponents.

    Each rank counts its own gradient, accumulated over the microbatches and divided by its block's scale if it has one,
    before anything else is done to it. It is not averaged with other ranks' gradients (except under FSDP, where each
    rank counts its shard), not clipped, and not discarded if the update is skipped. Counts are summed over all ranks;
    zeros and values that are not finite have separate columns. The chart shows which exponents fp16 represents
    after multiplication with each block's scale, and which 1-6-9 represents. The host waits for the device only in
    batches that are counted.
    """

    def __init__(self, task: Task, output: str, *, every: Duration = "100ba", log2_scale: float = 13.0) -> None:
        """
        Args:
            every: interval; the gradients counted are those of the next batch.
            log2_scale: binary logarithm of the scale for which the range of fp16 is drawn if blocks have no scale.

        Raises:
            ValueError: the model has no blocks.
        """
        super().__init__(every)
        self.every = every
        block_matrices(task, "exponents")  # asked again when they are sharded
        self.task = task
        self.folder = Path(output, "exponents")
        self.log2_scale = log2_scale
        self.counting = False
        self.counts = torch.empty(0)  # (blocks, COLUMNS) int64
        self.scales = torch.empty(0)  # (blocks,) float32: the factor in the gradients when they are counted

    def loaded(self, run: Run) -> None:
        # Levers that change gradients register their hooks later, when training begins, so that these run first.
        matrices = block_matrices(self.task, "exponents")
        device = next(self.task.parameters()).device
        self.counts = torch.zeros(len(matrices), COLUMNS, dtype=torch.int64, device=device)
        self.scales = torch.ones(len(matrices), device=device)
        for number, block in enumerate(matrices):
            for parameter in block:
                parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._count(p, number))

    def act(self, run: Run) -> None:
        self.counting = run.clock.crossed(self.every)  # the end of a run is no reason: it may be made longer

    def state_dict(self) -> dict[str, Any]:
        """Whether the next batch is counted, also by a run that goes on from here."""
        return {"counting": self.counting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count the next batch if the run that saved would have."""
        self.counting = state.get("counting", False)

    def before_backward(self, run: Run) -> None:
        if self.counting:  # each pass counts anew; the counts of the last one remain, which sees the accumulated sum
            self.counts.zero_()
            self.scales.copy_(torch.stack(self._factors(run)))

    def _factors(self, run: Run) -> list[Tensor]:
        """The factor in each block's gradients during the backward pass: one float32 scalar per block."""
        whole = self.scales.new_tensor(run.gradient_scale())
        branches = [getattr(block, "branch", None) for block in self.task.blocks()]
        return [branch.gradient_scale if isinstance(branch, ScaledBranch) else whole for branch in branches]

    @torch.no_grad()
    def _count(self, parameter: Tensor, block: int) -> None:
        if self.counting:
            gradient = own(parameter.grad)
            self.counts[block] += count_exponents(gradient.float() / self.scales[block])

    def gradients_ready(self, run: Run) -> None:
        if not self.counting:
            return
        self.counting = False
        counts = self.counts.clone()
        ranks.all_reduce(counts)
        names = {id(module): name for name, module in self.task.named_modules()}
        scaled = run.precision == "amp_fp16" or any(
            isinstance(getattr(block, "branch", None), ScaledBranch) for block in self.task.blocks()
        )
        log2_scales = self.scales.log2().tolist() if scaled else [self.log2_scale] * len(counts)
        found = Histograms([names[id(block)] for block in self.task.blocks()], counts.cpu(), log2_scales)
        run.log({f"exponents/{name}": share for name, share in found.shares().items()})
        if ranks.is_first_rank():
            batch = run.clock.batch
            path = self.folder / f"ba{batch:07d}.png"
            write_json(path.with_suffix(".json"), {"batches": batch, "scaled": scaled, **found.record()})
            write_chart(exponent_chart(found, batch, scaled), path)


def exponent_chart(found: Histograms, batch: int, scaled: bool) -> Figure:
    """The distribution of exponents (vertical) per block (horizontal), with the ranges of scaled fp16 and of 1-6-9.

    Args:
        found: the counts.
        batch: number of batches before the one whose gradients were counted.
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
