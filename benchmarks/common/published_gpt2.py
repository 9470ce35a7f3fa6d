"""Megatron-LM's transformer as its program computed it then: without fused attention, on the meta device.

Letters: B batch, S positions, d width, H heads, C tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu

from recipes.models.task import Task
from recipes.models.tensor_plan import DividedBranch, TensorPlan
from recipes.planning.tracing.trace import PASSES, Operation, Trace

FEW = (1, 2)  # layers, from which the pass of any number of equal layers follows


def deepened(one: Trace, two: Trace, layers: int) -> Trace:
    """The pass of a model of equal layers, from those of one layer and of two."""
    passes = {way: _deepened(getattr(one, way), getattr(two, way), layers) for way in PASSES}
    return dataclasses.replace(two, **passes)


def _deepened(one: tuple[Operation, ...], two: tuple[Operation, ...], layers: int) -> tuple[Operation, ...]:
    # Where they begin to differ, the second model has a layer more: up to the order, all of its operations.
    pairs = zip(one, two, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))
    return two + (layers - 2) * two[place : place + len(two) - len(one)]


class Layer(nn.Module):
    """Attention and MLP, each with its norm and its sum with the residual stream: the unit of recomputation."""

    def __init__(self, width: int, heads: int) -> None:
        """
        Args:
            width: d.
            heads: H.
        """
        super().__init__()
        self.head_width = width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        x = x + dropout(self.out(self._attend(self.norm(x))), 0.1)
        return x + dropout(self.down(gelu(self.up(self.mlp_norm(x)))), 0.1)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)  # (B, H, S, S)
        seen = torch.ones(scores.shape[-2:], dtype=scores.dtype, device=x.device).tril()
        scores = scores * seen - 1e4 * (1 - seen)
        y = dropout(scores.softmax(-1), 0.1) @ v  # (B, H, S, D)
        return y.transpose(1, 2).flatten(2)

    def branches(self) -> list[DividedBranch]:
        """How Shoeybi et al. divide this layer over devices."""
        return [
            DividedBranch(self, self.norm, (self.qkv,), self.out),
            DividedBranch(self, self.mlp_norm, (self.up,), self.down),
        ]


class Gpt2(Task):
    """GPT-2 as in Shoeybi et al. 2019, section 5: dropout 0.1, 1,024 positions, one table for input and output."""

    positions = 1024

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int = 51200) -> None:
        """
        Args:
            layers: of attention and MLP.
            width: d.
            heads: H.
            tokens: C, padded.
        """
        super().__init__()
        self.sizes = {"heads": heads, "tokens": tokens}
        self.table = nn.Embedding(tokens, width)
        self.places = nn.Embedding(self.positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.unembedding = nn.Linear(width, tokens, bias=False)
        self.unembedding.weight = self.table.weight

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`tokens` (B, S) int64 -> `total`."""
        x = dropout(self.table(batch["tokens"]) + self.places.weight, 0.1)  # (B, S, d)
        for layer in self.layers:
            x = layer(x)
        logits = self.unembedding(self.norm(x))  # (B, S, C)
        return {"total": cross_entropy(logits.flatten(0, 1).float(), batch["tokens"].flatten())}

    def recomputed_blocks(self) -> list[nn.Module]:
        """Each layer."""
        return list(self.layers)

    def tensor_plan(self) -> TensorPlan:
        """By heads, the MLP's inner width and tokens."""
        branches = [branch for layer in self.layers for branch in layer.branches()]
        return TensorPlan(
            branches=branches,
            vocabulary=self.unembedding,
            sizes=self.sizes,
            positions=self.positions,
            predicted=self.positions,
            width=self.places.embedding_dim,
            begins=self.table,  # not used: nothing is computed with sequence parallelism here
            ends=self.norm,
        )

    @classmethod
    def batch(cls, samples: int) -> dict[str, Tensor]:
        """A batch on the meta device."""
        return {"tokens": torch.empty(samples, cls.positions, dtype=torch.long, device="meta")}
