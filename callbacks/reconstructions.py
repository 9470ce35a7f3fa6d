"""Originals beside what an autoencoder makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Callback, Event, Logger, State
from composer.core import get_precision_context
from composer.utils import dist, model_eval_mode
from torch import nn

from callbacks.interval import at_intervals
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.cost import Cost, Files, Plan
from data.image_grid import picture_grid, save_png, to_uint8
from recipes.algorithms.averaging.scheduled_ema import averaged
from recipes.algorithms.sharding.shard import is_sharded
from recipes.models.kl_autoencoder.task import to_signed


class Reconstructions(Callback):
    """Draws the first pictures of the run and their reconstructions to <output>/reconstructions."""

    def __init__(self, task: nn.Module, output: str, *, every: Duration | None = None, pictures: int = 16) -> None:
        """
        Args:
            every: interval; null: only the end of the run, when one is always drawn.
            pictures: how many.
        """
        self.task = task
        self.folder = Path(output, "reconstructions")
        self.due = at_intervals(every)
        self.pictures = pictures
        self.originals: torch.Tensor | None = None

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """The grids that it writes, see `data.cost`."""
        return Cost(files=Files(args["every"], "a grid of images", f"{plan.output}/reconstructions"))

    def before_forward(self, state: State, logger: Logger) -> None:
        if self.originals is None:  # the same pictures all the time, so that grids compare
            self.originals = state.batch["image"][: self.pictures].clone()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if self.due(state, event):
            self._draw(state, logger)

    @torch.no_grad()
    def _draw(self, state: State, logger: Logger) -> None:
        first = dist.get_global_rank() == 0
        if self.originals is None or not (first or is_sharded(self.task)):
            return
        precision = get_precision_context(state.precision, state.precision_config)
        with averaged(state), model_eval_mode(self.task), precision:
            made = self.task.reconstruct(to_signed(self.originals))
        if not first:
            return
        both = np.stack([to_uint8(self.originals / 255), to_uint8((made + 1) / 2)], 1).reshape(-1, *made.shape[2:], 3)
        path = self.folder / f"ba{state.timestamp.batch.value:07d}.png"
        save_png(picture_grid(both, ["original", "reconstruction"] * len(made), columns=8, cell=96), path)
        logger.log_images(
            both, name="reconstructions", channels_last=True, step=state.timestamp.batch.value, use_table=False
        )
