"""Transformers of publications, as their programs computed them then: without fused attention, on the meta device.

Letters: B batch, S positions, d width, H heads, C tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, layer_norm, linear, scaled_dot_product_attention

from recipes.models.autoregressive.transformer import Unembedding
from recipes.models.task import Task
from recipes.models.tensor_plan import DividedBranch, TensorPlan
from recipes.planning.trace import Trace

Mixed = Literal["O1", "O2"]
FEW = (1, 2)  # layers, from which the pass of any number of equal layers follows


def deepened(one: Trace, two: Trace, layers: int) -> Trace:
    """The pass of a model of equal layers, from those of one layer and of two."""
    # Where they begin to differ, the second model has a layer more: up to the order, all of its operations.
    pairs = zip(one.operations, two.operations, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.operations))
    layer = two.operations[place : place + len(two.operations) - len(one.operations)]
    names = ("kept", "inputs", "outside")
    more = {name: getattr(two, name) + (layers - 2) * (getattr(two, name) - getattr(one, name)) for name in names}
    return dataclasses.replace(two, operations=two.operations + (layers - 2) * layer, **more)


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

    def __init__(self, width: int, heads: int, causal: bool, fused: bool, rate: float) -> None:
        """
        Args:
            width: d.
            heads: H.
            causal: whether a position sees only earlier ones.
            fused: whether attention is one kernel.
            rate: of dropout; 0: there is none.
        """
        super().__init__()
        self.head_width, self.causal, self.fused, self.rate = width // heads, causal, fused, rate
        self.norm, self.mlp_norm = Norm(width), Norm(width)
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        x = x + self._dropped(self.out(self._attend(self.norm(x))))
        return x + self._dropped(self.down(gelu(self.up(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.fused:
            y = scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, S, D)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)  # (B, H, S, S)
            if self.causal:
                seen = torch.ones(scores.shape[-2:], dtype=scores.dtype, device=x.device).tril()
                scores = scores * seen - 1e4 * (1 - seen)
            # Autocast computes softmax in 32 bits where the norms are in 32 bits.
            y = self._dropped(scores.to(self.norm.weight.dtype).softmax(-1)).to(v.dtype) @ v
        return y.transpose(1, 2).flatten(2)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.rate else x

    def branches(self) -> list[DividedBranch]:
        """How Shoeybi et al. divide it."""
        return [
            DividedBranch(self, self.norm, (self.q, self.k, self.v), self.out),
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
        self.layers = nn.ModuleList(Layer(width, heads, True, False, 0.1) for _ in range(layers))
        self.norm = Norm(width)
        self.unembedding = Unembedding(width, tokens)
        self.unembedding.weight = self.table.weight

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`tokens` (B, S) int64 -> `total`."""
        x = dropout(self.table(batch["tokens"]) + self.places.weight, 0.1)  # (B, S, d)
        for layer in self.layers:
            x = layer(x)
        hidden = self.norm(x).flatten(0, 1)
        return {"total": self.unembedding.losses(hidden, batch["tokens"].flatten()).mean()}

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
    """A vision transformer that classifies images of 224 x 224 pixels in patches of 14 x 14."""

    def __init__(self, *, layers: int, width: int, heads: int, mixed: Mixed, fused: bool) -> None:
        """
        Args:
            layers: of attention and MLP.
            width: d.
            heads: H.
            mixed: level of mixed precision.
            fused: whether attention is one kernel.
        """
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, 257, width))
        self.layers = nn.ModuleList(Layer(width, heads, False, fused, 0.0) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Linear(width, 1000)
        if mixed == "O2":
            self.to(torch.bfloat16)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`image` (B, 3, 224, 224) and `label` (B,) -> `total`."""
        x = self.patches(batch["image"].to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)  # (B, 256, d)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
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
