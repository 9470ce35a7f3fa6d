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
from data.ranges import check_least
from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.models.task import Task
from recipes.training.callback import PeriodicCallback
from recipes.training.finite import is_worth_keeping
from recipes.training.modes import evaluation_mode
from recipes.training.ranks import all_gather, by_first_rank, is_first_rank, rank, world_size
from recipes.training.run import Run


class PromptGrid(PeriodicCallback, ABC):
    """Writes a grid of captioned images to <output>/samples and to the loggers, at intervals and at the end.

    The weights are the averaged ones if the run has an average. The ranks share the images: each draws as many as the
    others, since a sharded model needs all ranks for each pass, and the first one decodes all.

    Attributes:
        component: its name in a recipe, for messages.
    """

    alone = True
    component: str

    def __init__(
        self,
        task: Task,
        output: str,
        average: ScheduledEMA | None,
        copies: int,
        prompts: list[str],
        every: str | None,
        columns: int | None,
        batch: int,
        seed: int = 0,
    ) -> None:
        """
        Args:
            task: the model.
            output: folder of the run.
            average: the run's average of the weights; None: it has none.
            copies: number of neighbouring ranks that must draw the same images, `training.tensor_parallel`.
            prompts: captions, one per image.
            every: interval; None: only the end of the run.
            columns: images per row; None: as many as make the grid nearest to a square.
            batch: number of images that a rank draws at once.
            seed: image i is drawn from seed + i.

        Raises:
            ValueError: no prompts, or numbers out of range.
        """
        super().__init__(every)
        if not prompts:
            raise ValueError(f"{self.component}: prompts is empty")
        check_least(self.component, 1, batch=batch, columns=columns)
        if abs(seed) >= 2**62:  # generators take 64 bits, and the number of an image is added
            raise ValueError(f"{self.component}: seed: {seed}; give a number below 2^62")
        self.task = task
        self.folder = Path(output, "samples")
        self.average = average
        self.copies = copies
        self.prompts = prompts
        self.columns = columns
        self.batch = batch
        self.seed = seed
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
    def draw(self, numbers: list[int]) -> torch.Tensor:
        """What the image encoder decodes to the images of the prompts with these numbers. It must not depend on other
        images, but for rounding. Where a network overflows, it is not finite, or a token of -1."""

    def begin(self, run: Run) -> None:
        self.text = by_first_rank(self._prepare)

    def _prepare(self) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
            self.image_encoder, text = self.prepare()
        return text

    def act(self, run: Run) -> None:
        images = self.images(run)
        if images is None:
            return
        path = self.folder / f"ba{run.clock.batch:07d}.png"
        save_png(picture_grid(images, self.prompts, self.columns), path)
        log.info(f"samples: {path}")
        run.log_images("samples", images)

    def images(self, run: Run) -> np.ndarray | None:
        """The prompts' images, (N, H, W, 3) uint8; None on all ranks but the first, and on all while losses, weights
        or images are not finite. Every rank must call it."""
        if not is_worth_keeping(run):  # drawing may fail, and the run ends by itself if it does not recover
            log.warning(f"samples: batch {run.clock.batch} is not finite; nothing is drawn")
            return None
        numbers = numbers_of(len(self.prompts), rank() // self.copies, world_size() // self.copies)
        with averaged(self.average), evaluation_mode(self.task), run.autocast():
            drawn = [self.draw(numbers[i : i + self.batch]) for i in range(0, len(numbers), self.batch)]
        parts = all_gather(torch.cat(drawn))[:: self.copies]
        if not is_first_rank():
            return None
        whole = torch.cat(parts)[: len(self.prompts)]
        finite = whole.isfinite() if whole.is_floating_point() else whole >= 0
        lost = int((~finite.reshape(len(whole), -1).all(1)).sum())
        if lost:  # they would be black, or any others
            log.warning(
                f"samples: batch {run.clock.batch}: {lost} of {len(whole)} images are not finite in the precision of "
                "the run; nothing is drawn"
            )
            return None
        self.image_encoder.to(whole.device)
        images = [to_uint8(self.image_encoder.decode(part)) for part in whole.split(self.batch)]
        self.image_encoder.to("cpu")  # its memory belongs to training
        return np.concatenate(images)


def numbers_of(count: int, rank: int, ranks: int) -> list[int]:
    """Numbers of the images that a rank draws, as many on each rank; the last ranks draw the last image again."""
    each = -(-count // ranks)
    return [min(number, count - 1) for number in range(rank * each, (rank + 1) * each)]
