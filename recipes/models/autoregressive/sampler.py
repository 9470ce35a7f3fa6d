"""Sampling of image tokens from a transformer, one after another, with a cache of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.models.autoregressive.transformer import TokenTransformer
from recipes.models.kernels.device_graph import DeviceGraph
from recipes.models.sampling import check_guidance

BEFORE_CAPTURE = 2  # tokens after which autocast has its copies of weights, and libraries have their workspaces
LEAST_TEMPERATURE = 1e-30  # logits that are divided by far smaller numbers are infinite, and their softmax is NaN

# Letters: C captions, n sequences per caption, B = C * n, T text positions, N image positions, K image codes.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a token is chosen from the softmax over image codes.

    Attributes:
        temperature: divides the logits.
        top_k: draw from the k most likely codes only; None: from all.
        top_p: draw from the smallest set of most likely codes whose probabilities sum to at least top_p (nucleus
            sampling, Holtzman et al. 2020); None: from all.
        guidance: weight of classifier-free guidance, null + guidance * (caption - null) on logits. 1 for none. The
            model should have seen the empty caption in training.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    guidance: float = 1.0

    def __post_init__(self) -> None:
        check_guidance(self.guidance)
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature: {self.temperature}; give {LEAST_TEMPERATURE:g} or more (top_k 1 takes the most likely "
                "code)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: {self.top_k}; give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; give a probability above 0, up to 1")


def choose(logits: Tensor, uniform: Tensor, choice: Choice) -> Tensor:
    """One code per row, drawn by inverting the cumulative distribution function.

    Args:
        logits: (B, K).
        uniform: (B,), in [0, 1), 32-bit.
        choice: temperature, top_k and top_p. The guidance is not applied here.

    Returns:
        (B,) int64. Any code if logits are NaN or infinite: one that is not there would end a process on a GPU.
    """
    # In float64: a token of probability 0 must not be drawn, and the order of additions must not matter.
    probability = (logits.double() / choice.temperature).softmax(dim=-1)
    codes = probability.shape[-1]
    top_k, top_p, order = choice.top_k or codes, choice.top_p or 1.0, None
    if top_k < codes or top_p < 1:  # otherwise all codes are left, and a seed gives the one that it gives without
        probability, order = probability.sort(dim=-1, descending=True, stable=True)
        probability[:, top_k:] = 0
        if top_p < 1:
            before = probability.cumsum(dim=-1) - probability
            # Relative to the total probability of the codes that top_k left.
            probability[before >= top_p * probability.sum(dim=-1, keepdim=True)] = 0
    below = probability.cumsum(dim=-1)
    index = torch.searchsorted(below, uniform.double()[:, None] * below[:, -1:], right=True)  # (B, 1)
    index = index.clamp_(max=codes - 1)  # no sum is above a number that is not
    return (index if order is None else order.gather(1, index))[:, 0]


def uniforms(seeds: list[int], count: int) -> Tensor:
    """Uniform numbers (len(seeds), count) in [0, 1), float32, on the CPU.

    Each seed has its own generator, so that its numbers depend neither on the batch nor on the device.
    """
    return torch.stack([torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def pad_captions(captions: list[list[int]], positions: int) -> Tensor:
    """Encoded captions as (C, T) int64, T = `positions`: longer captions are cut, shorter ones padded with -1."""
    text = torch.full((len(captions), positions), -1, dtype=torch.int64)
    for row, numbers in zip(text, captions, strict=True):
        row[: len(numbers)] = torch.tensor(numbers[:positions], dtype=torch.int64)
    return text


@torch.no_grad()
def sample_tokens(
    network: TokenTransformer,
    text: Tensor,
    uniform: Tensor,
    choice: Choice,
    given: Tensor | None = None,
    graph: DeviceGraph | None = None,
) -> Tensor:
    """Grids of image tokens for captions.

    Args:
        network: the trained transformer.
        text: (C, T) int64, -1 for padding.
        uniform: (C, n, N), from `uniforms`: one number per token of each sequence, which selects the token.
        choice: how tokens are chosen.
        given: (C, m) int64, the first m image tokens in raster order; None: none.
        graph: a new CUDA graph. All kernels of a token are then launched together. The network must not be sharded.

    Returns:
        (C, n, N) int64. All tokens of a sequence are -1 if logits of one of them are not finite, such as those of a
        network that overflows: nothing can be drawn from them. The network is called as often as for the others,
        because other ranks may take part in each call.

    Raises:
        ValueError: more tokens are given than a grid has.
    """
    captions, each, count = uniform.shape
    given = text.new_zeros(captions, 0) if given is None else given
    if given.shape[1] > count:
        raise ValueError(f"sample_tokens: {given.shape[1]} image tokens are given, a grid has {count}")
    drawing = Drawing(network, text, uniform, choice, given)
    left = count - given.shape[1]
    # Blocks that are compiled for training would be recompiled for each cache and each length.
    with torch.compiler.set_stance("force_eager"):
        if left:
            drawing.first_token(drawing.first_logits())
            drawing.next_tokens(left - 1, graph)
    return drawing.tokens.masked_fill(drawing.lost, -1).unflatten(0, (captions, each))


class Drawing:
    """Grids of image tokens that are being drawn, in memory that stays where it is. See `sample_tokens`.

    Attributes:
        tokens: (B, N) int64, those that are given or drawn, then zeros.
        lost: (B, 1) bool, whether logits of a token were not finite; that token and those after it are any codes.
    """

    def __init__(
        self, network: TokenTransformer, text: Tensor, uniform: Tensor, choice: Choice, given: Tensor
    ) -> None:
        captions, each, count = uniform.shape
        self.network = network
        self.choice = choice
        self.each = each
        self.uniform = uniform.flatten(0, 1)  # (B, N)
        self.guided = choice.guidance != 1.0
        self.text = torch.cat([torch.full_like(text, -1), text]) if self.guided else text  # no caption is all padding
        self.given = given
        rest = text.new_zeros(captions * each, count - given.shape[1])
        self.tokens = torch.cat([given.repeat_interleave(each, 0), rest], 1)
        self.lost = torch.zeros_like(self.tokens[:, :1], dtype=torch.bool)
        self.caches = network.new_caches(each)

    def first_logits(self) -> Tensor:
        """(C, K), or (2C, K) with guidance, of the first token after those that are given: once per caption."""
        image = self._both(self.given)
        return self.network.image_logits(self.network(self.text, image, self.caches)[:, -1])

    def first_token(self, logits: Tensor) -> None:
        """Draw that token for each sequence."""
        self._choose(logits.repeat_interleave(self.each, 0))

    def next_tokens(self, count: int, graph: DeviceGraph | None) -> None:
        """Draw so many tokens more."""
        eager = count if graph is None else min(count, BEFORE_CAPTURE)
        for _ in range(eager):
            self._next_token()
        if eager < count:
            with graph.capture():
                self._next_token()
            for _ in range(count - eager):
                graph.replay()

    def _next_token(self) -> None:
        image = self._both(self.tokens.index_select(1, self.caches.image))  # the last token, which no cache holds yet
        self._choose(self.network.image_logits(self.network(None, image, self.caches)[:, 0]))

    def _both(self, image: Tensor) -> Tensor:
        return torch.cat([image, image]) if self.guided else image

    def _choose(self, logits: Tensor) -> None:
        """(B, K), or (2B, K) with guidance, of the token that follows those in the caches."""
        number = self.caches.image
        if self.guided:
            null, captioned = logits.chunk(2)
            logits = null + self.choice.guidance * (captioned - null)
        self.lost.logical_or_(~logits.amax(1, keepdim=True).isfinite())  # NaN if one is NaN
        uniform = self.uniform.index_select(1, number)[:, 0]
        self.tokens.index_copy_(1, number, choose(logits, uniform, self.choice)[:, None])
