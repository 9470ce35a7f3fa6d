"""The attention of a network: every call recorded or computed in another way, and the memory of its scores.

The formulas are those of Golden et al. 2023, "Generative AI Beyond LLMs: System Implications of Multi-Modal
Generation", section V-A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

from recipes.models.autoregressive import cache

SPAN = "## attention"  # of a profile, with the prefix of spans in `gpu_run.operators`
Way = Literal["written out", "one call"]
WAYS: tuple[Way, Way] = ("written out", "one call")  # matrix products and softmax, scaled_dot_product_attention
BYTES = 2  # of a score, as in the formulas

# Letters: B batch, H heads, Q queries, K keys, D head width. For a cache C, n, T and its own K, see `attend_in_two`.


@dataclass(frozen=True)
class Call:
    """One call of attention.

    Attributes:
        queries: positions that attend.
        keys: positions that each query is multiplied with, those that the mask hides included.
        matrices: number of score matrices (queries, keys): batch size times heads.
        seen: keys that the mask leaves to the last query; None if the mask has no values (on the meta device).
    """

    queries: int
    keys: int
    matrices: int
    seen: int | None

    @property
    def bytes(self) -> int:
        """Memory of one score matrix in 16 bits."""
        return BYTES * self.queries * self.keys


@contextmanager
def attention_by(way: Way, calls: list[Call] | None = None) -> Iterator[None]:
    """A context in which attention is computed in one of two ways, each call in a span of the profiler.

    It replaces PyTorch's scaled_dot_product_attention and the two products of cached sampling. What uses neither, such
    as FlexAttention and the implementation `local` of DALL-E's transformer, stays as it is and is not recorded.

    Args:
        way: how all calls are computed.
        calls: receives a record of each.
    """
    plain, in_two = functional.scaled_dot_product_attention, cache.attend_in_two
    one_call = written_out if way == "written out" else plain

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False) -> Tensor:
        if calls is not None:
            calls.append(_call(query, key.shape[-2], attn_mask))
        with record_function(SPAN):
            return one_call(query, key, value, attn_mask, dropout_p, is_causal)

    def attend_cached(q, k_text, v_text, k_local, v_local, hidden) -> Tensor:
        text = k_text.shape[2]
        if calls is not None:
            seen = functional.pad(~hidden, (text, 0), value=True)
            calls.append(_call(q, text + k_local.shape[3], seen))
        with record_function(SPAN):
            if way == "written out":
                return in_two(q, k_text, v_text, k_local, v_local, hidden)
            return in_one(plain, q, k_text, v_text, k_local, v_local, hidden)

    with (
        patch.object(functional, "scaled_dot_product_attention", attend),
        patch.object(cache, "attend_in_two", attend_cached),
    ):
        yield


def _call(query: Tensor, keys: int, mask: Tensor | None) -> Call:
    seen = keys if mask is None else None if mask.is_meta else int(mask.reshape(-1, keys)[-1].sum())
    return Call(query.shape[-2], keys, math.prod(query.shape[:-2]), seen)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Attention with all scores in memory, (B, H, Q, D) and twice (B, H, K, D) -> (B, H, Q, D).

    The queries are scaled and not their products with the keys, which are more numbers.

    Args:
        attn_mask: bool, broadcastable to (B, H, Q, K): which keys a query sees.
        dropout_p: 0; inference has no dropout.
        is_causal: a query sees the keys up to its own position; then without a mask.
    """
    assert not dropout_p and (attn_mask is None or (attn_mask.dtype == torch.bool and not is_causal))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(dim=-1).to(value.dtype) @ value


def in_one(
    attend: Callable[..., Tensor],
    q: Tensor,
    k_text: Tensor,
    v_text: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    hidden: Tensor,
) -> Tensor:
    """What `attend_in_two` computes for one token, by one call of `attend` with the keys copied next to each other.

    Args:
        attend: as scaled_dot_product_attention.
        q: (C, H, n, 1, D); the others as of `attend_in_two`, with `hidden` (K,).
    """
    text, each = k_text.shape[2], q.shape[2]
    keys, values = (
        torch.cat([shared[:, :, None].expand(-1, -1, each, -1, -1), local], dim=3).flatten(1, 2)  # (C, H n, T + K, D)
        for shared, local in ((k_text, k_local), (v_text, v_local))
    )
    seen = functional.pad(~hidden, (text, 0), value=True).view(1, 1, 1, -1)
    return attend(q.flatten(1, 2), keys.to(q.dtype), values.to(q.dtype), seen).unflatten(1, q.shape[1:3])


def scores_bytes(positions: int, text: int = 0) -> int:
    """The formula for self-attention of image positions and cross-attention to a text: one sample, one head, 16 bits.

    Args:
        positions: of the image or latent, height times width.
        text: positions of the text; 0: no cross-attention.
    """
    return BYTES * positions * (positions + text)


def unet_scores_bytes(
    positions: int, text: int, depth: int, blocks: int = 2, heads: Sequence[int] | None = None
) -> int:
    """The formula for one pass of a U-Net whose grid halves from level to level.

    Args:
        positions: of the latent at the first level.
        text: positions of the text.
        depth: levels with attention above the middle block.
        blocks: transformer blocks of such a level, on the way down and up together. The formula of the paper has 2. The
            middle has one.
        heads: of each level, then of the middle; None: one, as in the paper.
    """
    heads = [1] * (depth + 1) if heads is None else heads
    levels = [heads[n] * scores_bytes(positions // 4**n, text) for n in range(depth + 1)]
    return blocks * sum(levels[:-1]) + levels[-1]
