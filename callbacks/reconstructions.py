"""Images beside their reconstructions by an autoencoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from callbacks.averaged import averaged
from data.aliases import Duration
from data.cost import Cost, Files, Plan
from data.image_grid import picture_grid, save_png, to_uint8
from data.ranges import check_least
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import is_sharded
from recipes.models.kl_autoencoder.task import to_signed
from recipes.models.task import Task
from recipes.training.callback import PeriodicCallback
from recipes.training.modes import evaluation_mode
from recipes.training.ranks import is_first_rank
from recipes.training.run import Run


class Reconstructions(PeriodicCallback):
    """Writes a grid of the run's first images and their reconstructions to <output>/reconstructions.

    The weights are the averaged ones if the run has an average.
    """

    alone = True

    def __init__(
        self,
        task: Task,
        output: str,
        average: ScheduledEMA | None,
        *,
        every: Duration | None = None,
        pictures: int = 16,
    ) -> None:
        """
        Args:
            every: interval; null: only at the end of the run, when a grid is always written.
            pictures: number of images, of the first rank's first batch.

        Raises:
            ValueError: the model reconstructs no images, or none are asked for.
        """
        super().__init__(every)
        check_least("reconstructions", 1, pictures=pictures)
        if "reconstruct" not in task.entry_points:
            raise ValueError(f"reconstructions: a {type(task).__name__} reconstructs no images; remove the callback")
        self.task = task
        self.folder = Path(output, "reconstructions")
        self.average = average
        self.pictures = pictures
        self.originals: torch.Tensor | None = None
        self.chosen = False  # whether `originals` are all that grids show

    def before_forward(self, run: Run) -> None:
        if self.chosen:
            return
        images = run.batch["image"]
        images = images if self.originals is None else torch.cat([self.originals, images])
        self.originals = images[: self.pictures].clone()

    def gradients_ready(self, run: Run) -> None:
        self.chosen = True  # after the first batch: the same images in every grid, so that grids can be compared

    def state_dict(self) -> dict[str, Any]:
        """The images, so that a resumed run shows the same."""
        return {} if self.originals is None else {"originals": self.originals.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the images of a checkpoint."""
        self.originals = state.get("originals")
        self.chosen = self.originals is not None

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """The grids that it writes, see `data.cost`."""
        return Cost(files=Files(args["every"], "a grid of images", f"{plan.output}/reconstructions"))

    @torch.no_grad()
    def act(self, run: Run) -> None:
        if self.originals is None or not (is_first_rank() or is_sharded(self.task)):
            return
        with averaged(self.average), evaluation_mode(self.task), run.autocast():
            made = self.task.reconstruct(to_signed(self.originals.to(run.device)))
        if not is_first_rank():
            return
        both = np.stack([to_uint8(self.originals / 255), to_uint8((made + 1) / 2)], 1).reshape(-1, *made.shape[2:], 3)
        path = self.folder / f"ba{run.clock.batch:07d}.png"
        save_png(picture_grid(both, ["original", "reconstruction"] * len(made), columns=8, cell=96), path)
        run.log_images("reconstructions", both)
