"""Pictures from fixed prompts and seeds while a model trains: what all kinds have in common, and diffusion's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from composer import Callback, Event, Logger, State
from composer.core import get_precision_context
from composer.utils import dist, model_eval_mode
from torch import nn

from callbacks.interval import at_intervals
from callbacks.pictures import picture_grid, save_png, to_uint8
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.loading import Loading
from recipes.algorithms.scheduled_ema import averaged
from recipes.algorithms.sharding import is_sharded
from recipes.models.latent_diffusion import LatentDiffusion
from recipes.models.samplers import initial_noise, make_scheduler, sample


class PromptGrid(Callback):
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

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
                self.text, self.image_encoder = self._prepare()
        if is_sharded(self.task):  # every rank samples, as parts of the model are gathered from all
            held = [self.text]
            dist.broadcast_object_list(held)
            self.text = held[0]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if self.due(state, event):
            self._draw(state, logger)

    def _draw(self, state: State, logger: Logger) -> None:
        first = dist.get_global_rank() == 0
        if not first and not is_sharded(self.task):
            return  # and wait at the next collective
        precision = get_precision_context(state.precision, state.precision_config)
        with averaged(state), model_eval_mode(self.task), precision:
            batches = self._sample()
        if not first:
            return
        self.image_encoder.to(batches[0].device)
        pictures = to_uint8(torch.cat([self.image_encoder.decode(batch).cpu() for batch in batches]))
        self.image_encoder.to("cpu")  # its memory belongs to training
        path = self.folder / f"ba{state.timestamp.batch.value:07d}.png"
        save_png(picture_grid(pictures, self.prompts, self.columns), path)
        print(f"samples: {path}", flush=True)
        logger.log_images(
            pictures, name="samples", channels_last=True, step=state.timestamp.batch.value, use_table=False
        )

    def _prepare(self) -> tuple[torch.Tensor, Any]:
        """What the model takes of the prompts, and what decodes the samples; on the first rank."""
        raise NotImplementedError

    def _sample(self) -> list[torch.Tensor]:
        """Batches of what the decoder takes, one entry a prompt; on every rank where the model is sharded."""
        raise NotImplementedError


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
        sampler: Literal["ddim", "dpm++"] = "dpm++",
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
            sampler: which solver.
            columns: pictures a row; null: nearest to a square.
            batch: pictures sampled at once.
        """
        super().__init__(task, output, prompts, every, columns)
        self.loading = loading
        self.encoders = encoders
        self.seed = seed
        self.steps = steps
        self.guidance = guidance
        self.sampler = sampler
        self.batch = batch

    def _prepare(self) -> tuple[torch.Tensor, Any]:
        image_encoder, text_encoder = self.encoders()
        return text_encoder.encode(self.prompts), image_encoder

    def _sample(self) -> list[torch.Tensor]:
        device = next(self.task.parameters()).device
        shape = self.loading.manifest.latent_shape(self.loading.resolution)
        noise = initial_noise([self.seed + i for i in range(len(self.prompts))], shape)
        null_text = self.loading.null_text.to(device, torch.float32)
        scheduler_config = self.task.scheduler_config()
        latents = []
        for start in range(0, len(self.prompts), self.batch):
            part = slice(start, start + self.batch)
            latents.append(
                sample(
                    self.task.denoise,
                    make_scheduler(self.sampler, scheduler_config),
                    noise[part].to(device),
                    self.text[part].to(device, torch.float32),
                    null_text,
                    self.steps,
                    self.guidance,
                )
            )
        return latents
