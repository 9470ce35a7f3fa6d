"""GPT-2's transformer (Radford et al. 2019), as Shoeybi et al. (2019, sections 2.2, 3 and 4) train it.

Letters: B batch, S positions, d width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from data.ranges import check_least
from recipes.models.autoregressive.sparse_attention import Attend
from recipes.models.autoregressive.transformer import (
    MLP,
    CausalAttention,
    Residual,
    Unembedding,
    divided_branches,
)
from recipes.models.tensor_plan import TensorPlan

INITIAL = 0.02  # standard deviation of all initial weights (Shoeybi et al. 2019, section 4)


class TokenTable(Unembedding):
    """One table for both ends of the model: its rows embed tokens, and their products with vectors are logits."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 -> (B, S, d)."""
        return nn.functional.embedding(tokens, self.weight)


class Causal(nn.Module, Attend):
    """Attention to all earlier positions, with dropout of the attention weights in training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.p = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, S, D) each -> (B, H, S, D)."""
        dropout = self.p if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class TextTransformer(nn.Module):
    """Text tokens -> one vector per position, from which the next token is predicted."""

    def __init__(
        self, *, layers: int, width: int, heads: int, positions: int, vocabulary: int, dropout: float = 0.1
    ) -> None:
        """Build it with new weights from N(0, 0.02^2); those of layers that end a residual branch are divided by
        sqrt(2 layers). Biases are 0.

        Args:
            layers: number of attention layers, each followed by an MLP.
            width: width of the residual stream, d.
            heads: number of attention heads, H.
            positions: number of positions, S.
            vocabulary: number of rows of the token embedding, V.
            dropout: share of the embeddings, of the attention weights and of each branch's outputs that are dropped.

        Raises:
            ValueError: no layers or positions, a width that is not a multiple of the heads, or no share.
        """
        super().__init__()
        check_least("language", 1, width=width, heads=heads, vocabulary=vocabulary)
        if layers < 1 or positions < 1 or width % heads:
            raise ValueError(
                f"language: {layers} layers, {positions} positions, width {width}, {heads} heads: give at least 1 "
                "layer and position, and a width that is a multiple of the number of heads"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"language: dropout is a share from 0 to below 1, got {dropout}")
        self.tokens = TokenTable(width, vocabulary)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.attend = Causal(dropout)
        # Attention and MLP of layer i are blocks 2i and 2i + 1.
        self.blocks = nn.ModuleList(
            Residual(branch, dropout) for _ in range(layers) for branch in (CausalAttention(width, heads), MLP(width))
        )
        self.norm = nn.LayerNorm(width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            last = block.branch.out if isinstance(block.branch, CausalAttention) else block.branch.down
            last.weight.div_(math.sqrt(len(self.blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, n) int64 in [0, V), n up to S -> (B, n, d)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens.embed(tokens) + self.positions(places)  # (B, n, d)
        x = self.dropout(x.to(torch.promote_types(x.dtype, torch.float32)))  # float32, also with 16-bit embeddings
        for number, block in enumerate(self.blocks):
            x = block(x) if number % 2 else block(x, self.attend)
        return self.norm(x)

    def tensor_plan(self) -> TensorPlan:
        """How tensor parallelism divides it: attention by heads, MLPs by their inner width, the table by tokens."""
        width, length = self.norm.normalized_shape[0], self.positions.num_embeddings
        return TensorPlan(
            branches=divided_branches(self.blocks),
            vocabulary=self.tokens,
            sizes={
                "heads": width // self.blocks[0].branch.head_width,
                "vocabulary": self.tokens.out_features,
            },
            positions=length,
            predicted=length,
            width=width,
            begins=self.dropout,
            ends=self.norm,
            embeds=True,
            draws=(self.attend,),
            dropouts=[self.dropout, *(block.dropout for block in self.blocks if block.dropout is not None)],
        )

    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one sample, counting a multiply-add as 2. The backward pass has twice as many.

        Of attention, the visible pairs are counted only.
        """
        width, length = self.norm.normalized_shape[0], self.positions.num_embeddings
        matrices = sum(m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))
        pairs = length * (length + 1) // 2
        return 2.0 * matrices * length + 4.0 * width * pairs * (len(self.blocks) // 2)
