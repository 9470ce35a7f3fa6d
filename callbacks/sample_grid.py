"""Pictures from fixed prompts and seeds while a diffusion model trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from composer import Callback, Event, Logger, State
from composer.core import get_precision_context
from composer.utils import dist, model_eval_mode

from callbacks.interval import at_intervals
from callbacks.pictures import picture_grid, save_png, to_uint8
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.loading import Loading
from recipes.algorithms.scheduled_ema import averaged
from recipes.algorithms.sharding import is_sharded
from recipes.models.latent_diffusion import LatentDiffusion
from recipes.models.samplers import initial_noise, make_scheduler, sample


class SampleGrid(Callback):
    """Samples a grid of captioned pictures to <output>/samples and to the loggers, from the same noise every time.

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
        if not prompts:
            raise ValueError("sample_grid: prompts is empty")
        self.task = task
        self.folder = Path(output, "samples")
        self.loading = loading
        self.encoders = encoders
        self.prompts = prompts
        self.due = at_intervals(every)
        self.seed = seed
        self.steps = steps
        self.guidance = guidance
        self.sampler = sampler
        self.columns = columns
        self.batch = batch
        self.text: torch.Tensor | None = None
        self.image_encoder: Any = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
                self.image_encoder, text_encoder = self.encoders()
                self.text = text_encoder.encode(self.prompts)
        if is_sharded(self.task):  # every rank draws, as the denoiser's parts are gathered from all
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
        with averaged(state):
            latents = self._latents(state)
        if not first:
            return
        pictures = to_uint8(self._decoded(latents))
        path = self.folder / f"ba{state.timestamp.batch.value:07d}.png"
        save_png(picture_grid(pictures, self.prompts, self.columns), path)
        print(f"samples: {path}", flush=True)
        logger.log_images(
            pictures, name="samples", channels_last=True, step=state.timestamp.batch.value, use_table=False
        )

    def _latents(self, state: State) -> list[torch.Tensor]:
        device = next(self.task.parameters()).device
        shape = self.loading.manifest.latent_shape(self.loading.resolution)
        noise = initial_noise([self.seed + i for i in range(len(self.prompts))], shape)
        null_text = self.loading.null_text.to(device, torch.float32)
        scheduler_config = self.task.scheduler_config()
        latents = []
        with model_eval_mode(self.task), get_precision_context(state.precision, state.precision_config):
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

    def _decoded(self, latents: list[torch.Tensor]) -> torch.Tensor:
        self.image_encoder.to(latents[0].device)
        pictures = torch.cat([self.image_encoder.decode(part).cpu() for part in latents])
        self.image_encoder.to("cpu")  # its memory belongs to training
        return pictures
