"""Pictures from fixed prompts and seeds while a transformer over tokens trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer import State

from callbacks.sample_grid import PromptGrid
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.bpe import Vocabulary
from data.loading import Loading
from recipes.models.autoregressive.sampler import Choice, pad_captions, uniforms
from recipes.models.autoregressive.task import Autoregressive


class TokenGrid(PromptGrid):
    """Samples a grid of captioned pictures from a transformer over tokens to <output>/samples, by the same draws.

    The weights are the averaged ones where the run has an average.
    """

    def __init__(
        self,
        task: Autoregressive,
        output: str,
        loading: Loading,
        encoders: Callable[[], tuple[Any, Any]],
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
            prompts: captions, one picture each.
            every: interval; null: only the end of the run, when one is always drawn.
            seed: the i-th picture's tokens are drawn by seed + i.
            temperature: divides the logits.
            top_k: only the so many likeliest codes; null: all.
            top_p: only the fewest likeliest codes that have this share of the probability; null: all.
            guidance: classifier-free guidance, for data with caption_dropout; 1 for none.
            columns: pictures a row; null: nearest to a square.
            batch: pictures sampled at once.
        """
        super().__init__(task, output, prompts, every, columns)
        self.choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p, guidance=guidance)
        self.loading = loading
        self.encoders = encoders
        self.seed = seed
        self.batch = batch

    def prepare(self) -> tuple[Any, torch.Tensor]:
        """See `PromptGrid.prepare`."""
        vocabulary = Vocabulary.read(self.loading.vocabulary)
        encoded = [vocabulary.encode(prompt) for prompt in self.prompts]
        return self.encoders()[0], pad_captions(encoded, self.task.network.layout.text)

    def draw(self, state: State) -> list[torch.Tensor]:
        """Grids of tokens (B, R, R); see `PromptGrid.draw`."""
        layout = self.task.network.layout
        device = next(self.task.parameters()).device
        uniform = uniforms([self.seed + i for i in range(len(self.prompts))], layout.image)[:, None]  # (N, 1, tokens)
        grids = []
        for start in range(0, len(self.prompts), self.batch):
            part = slice(start, start + self.batch)
            tokens = self.task.sample(self.text[part].to(device), uniform[part].to(device), self.choice)
            grids.append(tokens[:, 0].unflatten(1, (layout.side, layout.side)))
        return grids
