"""Transformers of publications, as their programs computed them then: without fused attention, on the meta device.

Letters: B batch, S positions, d width, H heads, C tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, layer_norm, linear

from recipes.models.task import Task
from recipes.models.tensor_plan import DividedBranch, TensorPlan
from recipes.planning.trace import PASSES, Operation, Trace

Mixed = Literal["O1", "O2"]
FEW = (1, 2)  # layers, from which the pass of any number of equal layers follows


def deepened(one: Trace, two: Trace, layers: int) -> Trace:
    """The pass of a model of equal layers, from those of one layer and of two."""
    names = ("kept", "inputs", "outside")
    more = {name: getattr(two, name) + (layers - 2) * (getattr(two, name) - getattr(one, name)) for name in names}
    passes = {way: _deepened(getattr(one, way), getattr(two, way), layers) for way in PASSES}
    return dataclasses.replace(two, **passes, **more)


def _deepened(one: tuple[Operation, ...], two: tuple[Operation, ...], layers: int) -> tuple[Operation, ...]:
    # Where they begin to differ, the second model has a layer more: up to the order, all of its operations.
    pairs = zip(one, two, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))
    return two + (layers - 2) * two[place : place + len(two) - len(one)]


class Linear(nn.Linear):
    """A linear layer of Apex's or PyTorch's levels of mixed precision.

    O1: its weight is 32-bit and is cast in each pass, as its input is. O2: both are 16-bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in 16 bits."""
        return linear(*(t if t.dtype == torch.bfloat16 else t.bfloat16() for t in (x, self.weight, self.bias)))


class Norm(nn.LayerNorm):
    """A layer norm in 32 bits, whose result a linear layer casts (O1), or fused, with 16 bits in memory (O2)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d), in the format of the weight."""
        return layer_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.bias)


class Layer(nn.Module):
    """Attention and MLP, each with its norm and its sum with the residual stream: the unit of recomputation."""

    def __init__(self, width: int, heads: int, causal: bool, dropped: Collection[str]) -> None:
        """
        Args:
            width: d.
            heads: H.
            causal: whether a position sees only earlier ones.
            dropped: where dropout is an operation of its own: "attention", "inner" of the MLP, and the results of the
                "branches".
        """
        super().__init__()
        self.head_width, self.causal, self.dropped = width // heads, causal, dropped
        self.norm, self.mlp_norm = Norm(width), Norm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        x = x + self._drop("branches", self.out(self._attend(self.norm(x))))
        inner = self._drop("inner", gelu(self.up(self.mlp_norm(x))))  # (B, S, 4 d)
        return x + self._drop("branches", self.down(inner))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)  # (B, H, S, S)
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=scores.dtype, device=x.device).tril()
            scores = scores * seen - 1e4 * (1 - seen)
        # Autocast computes softmax in 32 bits where the norms are in 32 bits.
        y = self._drop("attention", scores.to(self.norm.weight.dtype).softmax(-1)).to(v.dtype) @ v  # (B, H, S, D)
        return y.transpose(1, 2).flatten(2)

    def _drop(self, where: str, x: Tensor) -> Tensor:
        return dropout(x, 0.1) if where in self.dropped else x

    def branches(self) -> list[DividedBranch]:
        """How Shoeybi et al. divide it."""
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
        self.layers = nn.ModuleList(Layer(width, heads, True, ("attention", "branches")) for _ in range(layers))
        self.norm = Norm(width)
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


class Vit(Task):
    """A vision transformer that classifies images of 224 x 224 pixels in patches of 14 x 14.

    Dropout is where Dosovitskiy et al. 2021 have it: after each linear layer but those of queries, keys and values, and
    after the embeddings of positions.
    """

    def __init__(self, *, layers: int, width: int, heads: int, mixed: Mixed, fused: bool) -> None:
        """
        Args:
            layers: of attention and MLP.
            width: d.
            heads: H.
            mixed: level of mixed precision.
            fused: whether dropout is part of the operation before it, and keeps no mask.
        """
        super().__init__()
        self.fused = fused
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, 257, width))
        dropped = () if fused else ("inner", "branches")
        self.layers = nn.ModuleList(Layer(width, heads, False, dropped) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Linear(width, 1000)
        if mixed == "O2":
            self.to(torch.bfloat16)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`image` (B, 3, 224, 224) and `label` (B,) -> `total`."""
        x = self.patches(batch["image"].to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)  # (B, 256, d)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        x = x if self.fused else dropout(x, 0.1)
        for layer in self.layers:
            x = layer(x)
        return {"total": cross_entropy(self.head(self.norm(x)[:, 0]).float(), batch["label"])}

    def blocks(self) -> list[nn.Module]:
        """Each layer."""
        return list(self.layers)

    @staticmethod
    def batch(samples: int) -> dict[str, Tensor]:
        """A batch on the meta device."""
        image = torch.empty(samples, 3, 224, 224, device="meta")
        return {"image": image, "label": torch.empty(samples, dtype=torch.long, device="meta")}
