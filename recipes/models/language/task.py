"""A language model as a training task: each token of a text is predicted from those before it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.models.language.transformer import TextTransformer
from recipes.models.network_folder import TransformerTask, load_network

# Letters: B batch, S positions, V vocabulary.


class Language(TransformerTask):
    """GPT-2 with tied input and output embeddings, as Shoeybi et al. (2019) train it, on packed texts."""

    eval_names = ("loss", "perplexity")
    eval_exponentials = {"perplexity": "loss"}

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        positions: int = 1024,
        vocabulary: int = 51200,
        dropout: float = 0.1,
    ) -> None:
        """Build it with new weights.

        Args:
            layers: number of attention layers, each followed by an MLP.
            width: width of the residual stream, a multiple of the number of heads.
            heads: number of attention heads.
            positions: number of tokens that are predicted per sample.
            vocabulary: number of tokens. It may be larger than that of the data: the rest pads the table to a size
                that is easy to divide over devices.
            dropout: share of the embeddings, of the attention weights and of the outputs of attention and MLP that
                training drops.

        Raises:
            ValueError: see `TextTransformer`.
        """
        super().__init__()
        self.sizes: dict[str, Any] = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "positions": positions,
            "vocabulary": vocabulary,
        }
        self.network = TextTransformer(**self.sizes, dropout=dropout)
        self.token_ids = {"tokens": range(vocabulary)}
        self.counted = {"tokens": vocabulary}
        self.counted_from = {"tokens": 1}

    def requirements(self) -> dict[str, int]:
        """The number of positions that the texts must be packed to, and the most tokens that they may have."""
        return {name: self.sizes[name] for name in ("positions", "vocabulary")}

    def recomputed_blocks(self) -> list[nn.Module]:
        """Their branches. Under tensor parallelism, recomputation then ends before a branch's closing message; dropout
        outside of it keeps one byte per value."""
        return [block.branch for block in self.network.blocks]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss.

        Args:
            batch: `tokens` (B, S + 1) int64 in [0, V).

        Returns:
            `total`: the mean cross-entropy of the S last tokens of all samples, in nats.
        """
        return {"total": self._losses(batch["tokens"]).mean()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`loss`, (B,), in nats per token. `perplexity` is the exponential of its mean over a validation set."""
        return {"loss": self._losses(batch["tokens"]).mean(1)}

    def _losses(self, tokens: Tensor) -> Tensor:
        """(B, S + 1) -> (B, S)."""
        hidden = self.network(tokens[:, :-1])  # (B, S, d)
        targets = tokens[:, 1:]
        return self.network.tokens.losses(hidden.flatten(0, 1), targets.flatten()).view(targets.shape)


def load_language(folder: Path) -> TextTransformer:
    """The network in the folder `transformer` of an export, without dropout. Only JSON and safetensors are read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the tensors do not have the sizes of config.json.
    """
    return load_network(folder, partial(TextTransformer, dropout=0.0))
