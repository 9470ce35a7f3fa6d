"""Image tokens drawn one after the other from a transformer, with or without a cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.models.autoregressive.transformer import TokenTransformer

# Letters: C captions, n sequences a caption, B = C * n, T text positions, N image positions, K image codes.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a token is chosen from the softmax over image codes.

    Attributes:
        temperature: divides the logits.
        top_k: only the so many likeliest codes; None: all.
        top_p: only the fewest likeliest codes whose probabilities sum to this share (Holtzman et al. 2020); None: all.
        guidance: 1 for the caption's own logits; above, away from those of the empty caption (null + guidance *
            (caption - null)), which a model should have seen in training.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature: {self.temperature}; give a number above 0 (top_k 1 takes the likeliest)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: {self.top_k}; give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; give a share above 0, up to 1")


def choose(logits: Tensor, uniform: Tensor, choice: Choice) -> Tensor:
    """A code a row, drawn by inverting its distribution function.

    Args:
        logits: (B, K).
        uniform: (B,), in [0, 1), 32-bit.
        choice: see there; the guidance is not applied here.

    Returns:
        (B,) int64.
    """
    # 64-bit sums: a token of probability 0 must not be drawn, nor the draw depend on the order of additions.
    probability = (logits.double() / choice.temperature).softmax(dim=-1)
    order = None
    if choice.top_k is not None or choice.top_p is not None:
        probability, order = probability.sort(dim=-1, descending=True, stable=True)
        if choice.top_k is not None:
            probability[:, choice.top_k :] = 0
        if choice.top_p is not None:
            before = probability.cumsum(dim=-1) - probability
            # Of those that top_k left: the share is one of their sum.
            probability[before >= choice.top_p * probability.sum(dim=-1, keepdim=True)] = 0
    below = probability.cumsum(dim=-1)
    index = torch.searchsorted(below, uniform.double()[:, None] * below[:, -1:], right=True)  # (B, 1)
    return (index if order is None else order.gather(1, index))[:, 0]


def uniforms(seeds: list[int], count: int) -> Tensor:
    """(len(seeds), count) in [0, 1), one CPU generator a seed: the same in any batch, on any device."""
    return torch.stack([torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def pad_captions(captions: list[list[int]], positions: int) -> Tensor:
    """(C, T) int64 of encoded captions: those longer than T = `positions` cut, -1 behind the last token of others."""
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
    cached: bool = True,
) -> Tensor:
    """Grids of image tokens for captions.

    Args:
        network: as trained.
        text: (C, T) int64, -1 where there is no token.
        uniform: (C, n, N), from `uniforms`: what each token of each sequence is drawn by.
        choice: how.
        given: (C, m) int64, the first m image tokens in raster order; None: none.
        cached: keep keys and values; False computes the whole sequence anew for each token, for comparison.

    Returns:
        (C, n, N) int64.

    Raises:
        ValueError: more tokens given than there are.
    """
    captions, each, count = uniform.shape
    given = text.new_zeros(captions, 0) if given is None else given
    if given.shape[1] > count:
        raise ValueError(f"sample_tokens: {given.shape[1]} image tokens are given, a grid has {count}")
    guided = choice.guidance != 1.0
    if guided:
        text = torch.cat([torch.full_like(text, -1), text])  # the empty caption is padding alone
    next_logits = (_with_cache if cached else _without_cache)(network, text, each)
    tokens = torch.cat([given.repeat_interleave(each, 0), text.new_zeros(captions * each, count - given.shape[1])], 1)
    uniform = uniform.flatten(0, 1)  # (B, N)
    # Blocks that are compiled for training would be compiled again for each cache and each length.
    with torch.compiler.set_stance("force_eager") if cached else nullcontext():
        for number in range(given.shape[1], count):
            seen = torch.cat([tokens, tokens]) if guided else tokens
            logits = next_logits(seen, number)
            if guided:
                null, captioned = logits.chunk(2)
                logits = null + choice.guidance * (captioned - null)
            tokens[:, number] = choose(logits, uniform[:, number], choice)
    return tokens.unflatten(0, (captions, each))


def _with_cache(network: TokenTransformer, text: Tensor, each: int) -> Callable[[Tensor, int], Tensor]:
    caches = network.new_caches(each)

    def next_logits(tokens: Tensor, number: int) -> Tensor:
        """(B, K) of image token `number`, whose predecessors are in `tokens` (B, N)."""
        if caches.begun:
            return network.image_logits(network(None, tokens[:, number - 1 : number], caches)[:, 0])
        last = network(text, tokens[::each, :number], caches)[:, -1]  # (C, d): once a caption, not once a sequence
        return network.image_logits(last).repeat_interleave(each, 0)

    return next_logits


def _without_cache(network: TokenTransformer, text: Tensor, each: int) -> Callable[[Tensor, int], Tensor]:
    text = text.repeat_interleave(each, 0)  # (B, T)

    def next_logits(tokens: Tensor, number: int) -> Tensor:
        """As above. What `tokens` holds from `number` on is not seen."""
        return network.image_logits(network(text, tokens)[:, text.shape[1] + number - 1])

    return next_logits
