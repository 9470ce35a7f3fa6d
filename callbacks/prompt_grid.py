"""Images that a model in training generates from fixed prompts: what all kinds of models have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from callbacks.averaged import averaged
from data.cost import Cost, Files, Plan, count_text
from data.image_grid import picture_grid, save_png, to_uint8
from data.log import log
from data.ranges import check_least
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import is_sharded
from recipes.models.task import Task
from recipes.training.callback import PeriodicCallback
from recipes.training.modes import evaluation_mode
from recipes.training.ranks import from_first_rank, is_first_rank
from recipes.training.run import Run


class PromptGrid(PeriodicCallback, ABC):
    """Writes a grid of captioned images to <output>/samples and to the loggers, at intervals and at the end.

    The weights are the averaged ones if the run has an average.
    """

    def __init__(
        self,
        task: Task,
        output: str,
        average: ScheduledEMA | None,
        prompts: list[str],
        every: str | None,
        columns: int | None,
        batch: int,
    ) -> None:
        """
        Args:
            task: the model.
            output: folder of the run.
            average: the run's average of the weights; None: it has none.
            prompts: captions, one per image.
            every: interval; None: only the end of the run.
            columns: images per row; None: as many as make the grid nearest to a square.
            batch: number of images drawn at once.

        Raises:
            ValueError: no prompts, or numbers out of range.
        """
        super().__init__(every)
        if not prompts:
            raise ValueError("sample_grid: prompts is empty")
        check_least("sample_grid", 1, batch=batch, columns=columns)
        self.task = task
        self.folder = Path(output, "samples")
        self.average = average
        self.prompts = prompts
        self.columns = columns
        self.batch = batch
        self.text: torch.Tensor | None = None
        self.image_encoder: Any = None

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """The grids that it writes, see `data.cost`."""
        what = f"a grid of {count_text(len(args['prompts']), 'image')}"
        return Cost(files=Files(args["every"], what, f"{plan.output}/samples"))

    @abstractmethod
    def prepare(self) -> tuple[Any, torch.Tensor]:
        """The image encoder, which decodes what `draw` returns, and the prompts as the model takes them."""

    @abstractmethod
    def draw(self, part: slice) -> torch.Tensor:
        """What the image encoder decodes to the images of some of the prompts.

        The first rank calls it; if the model is sharded, every rank does.
        """

    def begin(self, run: Run) -> None:
        if is_first_rank():
            with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
                self.image_encoder, self.text = self.prepare()
        if is_sharded(self.task):  # every rank takes part, because parameters are gathered from all ranks
            self.text = from_first_rank(self.text)

    def act(self, run: Run) -> None:
        images = self.images(run)
        if images is None:
            return
        path = self.folder / f"ba{run.clock.batch:07d}.png"
        save_png(picture_grid(images, self.prompts, self.columns), path)
        log.info(f"samples: {path}")
        run.log_images("samples", images)

    def images(self, run: Run) -> np.ndarray | None:
        """The prompts' images, (N, H, W, 3) uint8; None on all ranks but the first. Every rank must call it."""
        if not is_first_rank() and not is_sharded(self.task):
            return None  # and wait at the next collective
        with averaged(self.average), evaluation_mode(self.task), run.autocast():
            drawn = [self.draw(slice(i, i + self.batch)) for i in range(0, len(self.prompts), self.batch)]
        return to_uint8(self._decoded(drawn)) if is_first_rank() else None

    def _decoded(self, drawn: list[torch.Tensor]) -> torch.Tensor:
        self.image_encoder.to(drawn[0].device)
        images = torch.cat([self.image_encoder.decode(part).cpu() for part in drawn])
        self.image_encoder.to("cpu")  # its memory belongs to training
        return images
