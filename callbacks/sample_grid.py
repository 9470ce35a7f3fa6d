"""Images that a diffusion model in training generates from fixed prompts and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from callbacks.prompt_grid import PromptGrid
from data.aliases import Duration
from data.loading import Loading
from data.ranges import check_least
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.models.latent_diffusion.objective import seeded_noise
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.sampling import check_guidance


class SampleGrid(PromptGrid):
    """Samples a grid of captioned images from a diffusion model to <output>/samples, from the same noise every time.

    The weights are the averaged ones if the run has an average.
    """

    component = "sample_grid"

    def __init__(
        self,
        task: LatentDiffusion,
        output: str,
        loading: Loading,
        encoders: Callable[[], tuple[Any, Any]],
        average: ScheduledEMA | None,
        copies: int,
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
        """The encoders are those that the data's manifest names. The text encoder is freed once prompts are encoded.

        Args:
            prompts: captions, one per image.
            every: interval; null: only at the end of the run, when a grid is always written.
            seed: the noise of the i-th image is drawn from seed + i.
            steps: network evaluations per image.
            guidance: scale of classifier-free guidance; 1 for none.
            sampler: one of the objective's samplers, such as dpm++ or ddim; null: its default.
            columns: images per row; null: as many as make the grid nearest to a square.
            batch: number of images that a rank samples at once.

        Raises:
            ValueError: another kind of model, or options that it cannot sample with.
        """
        super().__init__(task, output, average, copies, prompts, every, columns, batch, seed)
        if "denoise" not in task.entry_points:
            raise ValueError(f"sample_grid: a {type(task).__name__} is no diffusion model; remove the callback")
        check_least("sample_grid", 1, steps=steps)
        check_guidance(guidance)
        self.loading = loading
        self.encoders = encoders
        self.steps = steps
        self.guidance = guidance
        self.sampler = task.objective.check_sampler(sampler)
        task.objective.check_steps(steps, self.sampler)  # now, and not when the first grid is due

    def prepare(self) -> tuple[Any, torch.Tensor]:
        """See `PromptGrid.prepare`."""
        image_encoder, text_encoder = self.encoders()
        text_encoder.to(next(self.task.parameters()).device)  # on a CPU, hundreds of captions take minutes
        parts = [self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch)]
        return image_encoder, torch.cat([text_encoder.encode(part).cpu() for part in parts])

    def draw(self, numbers: list[int]) -> torch.Tensor:
        """Latents (B, C, H, W); see `PromptGrid.draw`."""
        device = next(self.task.parameters()).device
        shape = self.loading.manifest.latent_shape(self.loading.resolution)
        seeds = [self.seed + number for number in numbers]
        return self.task.objective.sample(
            self.task.denoise,
            seeded_noise(seeds, shape).to(device),
            self.text[numbers].to(device, torch.float32),
            self.loading.null_text.to(device, torch.float32),
            self.steps,
            self.guidance,
            sampler=self.sampler,
        )
