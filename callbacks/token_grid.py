"""Images that a transformer over tokens in training generates from fixed prompts and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from callbacks.prompt_grid import PromptGrid
from data.aliases import Duration
from data.loading import Loading
from data.tokenizers.bpe import Vocabulary
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.models.autoregressive.sampler import Choice, pad_captions, uniforms
from recipes.models.autoregressive.task import Autoregressive


class TokenGrid(PromptGrid):
    """Samples a grid of captioned images from a transformer over tokens to <output>/samples.

    The weights are the averaged ones if the run has an average.
    """

    component = "token_grid"

    def __init__(
        self,
        task: Autoregressive,
        output: str,
        loading: Loading,
        encoders: Callable[[], tuple[Any, Any]],
        average: ScheduledEMA | None,
        copies: int,
        *,
        prompts: list[str],
        every: Duration | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance: float = 1.0,
        columns: int | None = None,
        batch: int = 16,
    ) -> None:
        """The dVAE is the one that the data's manifest names.

        Args:
            prompts: captions, one per image.
            every: interval; null: only at the end of the run, when a grid is always written.
            seed: the tokens of the i-th image are drawn from seed + i.
            temperature: divisor of the logits.
            top_k: sample from the k most likely codes; null: from all.
            top_p: sample from the fewest most likely codes whose probabilities sum to this; null: from all.
            guidance: scale of classifier-free guidance, for data with caption_dropout; 1 for none.
            columns: images per row; null: as many as make the grid nearest to a square.
            batch: number of images that a rank samples at once.

        Raises:
            ValueError: another kind of model, or options that it cannot sample with.
        """
        super().__init__(task, output, average, copies, prompts, every, columns, batch, seed)
        if "sample" not in task.entry_points:
            raise ValueError(f"token_grid: a {type(task).__name__} draws no tokens of images; remove the callback")
        self.choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p, guidance=guidance)
        self.loading = loading
        self.encoders = encoders

    def prepare(self) -> tuple[Any, torch.Tensor]:
        """See `PromptGrid.prepare`."""
        vocabulary = Vocabulary.read(self.loading.vocabulary.path)
        encoded = [vocabulary.encode(prompt) for prompt in self.prompts]
        image_encoder = self.encoders()[0]
        image_encoder.need_decoder()
        return image_encoder, pad_captions(encoded, self.task.network.layout.text)

    def draw(self, numbers: list[int]) -> torch.Tensor:
        """Grids of tokens (B, R, R); see `PromptGrid.draw`."""
        layout = self.task.network.layout
        device = next(self.task.parameters()).device
        seeds = [self.seed + number for number in numbers]
        uniform = uniforms(seeds, layout.image)[:, None]  # (B, 1, tokens)
        tokens = self.task.sample(self.text[numbers].to(device), uniform.to(device), self.choice)
        return tokens[:, 0].unflatten(1, (layout.side, layout.side))
