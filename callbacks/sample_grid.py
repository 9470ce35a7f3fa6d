"""Pictures from fixed prompts and seeds while a model trains: what all kinds have in common, and diffusion's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Event, Logger, State
from composer.core import get_precision_context
from composer.utils import dist, model_eval_mode
from torch import nn

from callbacks.interval import at_intervals
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.image_grid import picture_grid, save_png, to_uint8
from data.loading import Loading
from recipes.algorithms.averaging.scheduled_ema import averaged
from recipes.algorithms.sharding.shard import is_sharded
from recipes.models.latent_diffusion.objective import seeded_noise
from recipes.models.latent_diffusion.task import LatentDiffusion


class PromptGrid(Callback, ABC):
    """Draws a grid of captioned pictures to <output>/samples and to the loggers, at intervals and at the end.

    The weights are the averaged ones where the run has an average.
    """

    def __init__(
        self, task: nn.Module, output: str, prompts: list[str], every: str | None, columns: int | None
    ) -> None:
        """
        Args:
            task: the model.
            output: folder of the run.
            prompts: captions, one picture each.
            every: interval; None: only the end of the run.
            columns: pictures a row; None: nearest to a square.
        """
        if not prompts:
            raise ValueError("sample_grid: prompts is empty")
        self.task = task
        self.folder = Path(output, "samples")
        self.prompts = prompts
        self.due = at_intervals(every)
        self.columns = columns
        self.text: torch.Tensor | None = None
        self.image_encoder: Any = None

    @abstractmethod
    def prepare(self) -> tuple[Any, torch.Tensor]:
        """The image encoder, which decodes what is drawn, and the prompts as the model takes them."""

    @abstractmethod
    def draw(self, state: State) -> list[torch.Tensor]:
        """What the image encoder decodes to the prompts' pictures, in parts. Every rank of a sharded model calls it."""

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
                self.image_encoder, self.text = self.prepare()
        if is_sharded(self.task):  # every rank draws, as the model's parts are gathered from all
            held = [self.text]
            dist.broadcast_object_list(held)
            self.text = held[0]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if self.due(state, event):
            self._write(state, logger)

    def _write(self, state: State, logger: Logger) -> None:
        first = dist.get_global_rank() == 0
        if not first and not is_sharded(self.task):
            return  # and wait at the next collective
        precision = get_precision_context(state.precision, state.precision_config)
        with averaged(state), model_eval_mode(self.task), precision:
            drawn = self.draw(state)
        if not first:
            return
        pictures = to_uint8(self._decoded(drawn))
        path = self.folder / f"ba{state.timestamp.batch.value:07d}.png"
        save_png(picture_grid(pictures, self.prompts, self.columns), path)
        print(f"samples: {path}", flush=True)
        logger.log_images(
            pictures, name="samples", channels_last=True, step=state.timestamp.batch.value, use_table=False
        )

    def _decoded(self, drawn: list[torch.Tensor]) -> torch.Tensor:
        self.image_encoder.to(drawn[0].device)
        pictures = torch.cat([self.image_encoder.decode(part).cpu() for part in drawn])
        self.image_encoder.to("cpu")  # its memory belongs to training
        return pictures


class SampleGrid(PromptGrid):
    """Samples a grid of captioned pictures from a diffusion model to <output>/samples, from the same noise every time.

    The weights are the averaged ones where the run has an average.
    """

    def __init__(
        self,
        task: LatentDiffusion,
        output: str,
        loading: Loading,
        encoders: Callable[[], tuple[Any, Any]],
        *,
        prompts: list[str],
        every: Duration | None = None,
        seed: int = 0,
        steps: int = 25,
        guidance: float = 5.0,
        sampler: str | None = None,
        columns: int | None = None,
        batch: int = 16,
    ) -> None:
        """The encoders are those that the data's manifest names; the text encoder is held while prompts are encoded.

        Args:
            prompts: captions, one picture each.
            every: interval; null: only the end of the run, when one is always drawn.
            seed: the i-th picture's noise is drawn from seed + i.
            steps: network evaluations a picture.
            guidance: classifier-free guidance; 1 for none.
            sampler: one of the objective's samplers, such as dpm++ or ddim; null: its default.
            columns: pictures a row; null: nearest to a square.
            batch: pictures sampled at once.
        """
        super().__init__(task, output, prompts, every, columns)
        self.loading = loading
        self.encoders = encoders
        self.seed = seed
        self.steps = steps
        self.guidance = guidance
        self.sampler = task.objective.check_sampler(sampler)
        self.batch = batch

    def prepare(self) -> tuple[Any, torch.Tensor]:
        """See `PromptGrid.prepare`."""
        image_encoder, text_encoder = self.encoders()
        return image_encoder, text_encoder.encode(self.prompts)

    def draw(self, state: State) -> list[torch.Tensor]:
        """Latents; see `PromptGrid.draw`."""
        device = next(self.task.parameters()).device
        shape = self.loading.manifest.latent_shape(self.loading.resolution)
        noise = seeded_noise([self.seed + i for i in range(len(self.prompts))], shape)
        null_text = self.loading.null_text.to(device, torch.float32)
        latents = []
        for start in range(0, len(self.prompts), self.batch):
            part = slice(start, start + self.batch)
            latents.append(
                self.task.objective.sample(
                    self.task.denoise,
                    noise[part].to(device),
                    self.text[part].to(device, torch.float32),
                    null_text,
                    self.steps,
                    self.guidance,
                    sampler=self.sampler,
                )
            )
        return latents
