"""Cross-entropy of an unembedding that is divided over the vocabulary: per row, two numbers are exchanged, no logits.

Each device computes the logits of its own tokens, chunk by chunk, and keeps for each row the logarithm of the sum of
their exponentials, and the logit of the target if the target is its own. One all-gather of these two numbers per row
gives all devices the same losses (Shoeybi et al. 2019, section 3, exchange three all-reduces of one number each). In
the backward pass, the devices' gradients of the hidden vectors must be added, where these enter the divided region.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.algorithms.tensor_parallel.collectives import gathered
from recipes.models.autocast import for_products
from recipes.models.autoregressive.loss import CHUNK, chunks, narrow_product, wide, wide_factor, wide_product


def divided_token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, first: int, group: ProcessGroup) -> Tensor:
    """`token_losses` over the whole vocabulary, of which this device has a part.

    Args:
        hidden: (M, d), equal on all devices of the group.
        weight: (c, d), this device's rows of the unembedding.
        targets: (M,) int64 numbers of the whole vocabulary, or -1 for rows whose loss and gradient are 0.
        first: number of the first token of `weight` in the whole vocabulary.
        group: the devices that hold the vocabulary together.

    Returns:
        (M,), float32, or float64 if the factors are; the same bits on all devices. The gradient of `hidden` is this
        device's part, which the caller's `enter` or `gather_positions` adds to the others'.
    """
    return _DividedTokenLosses.apply(for_products(hidden), for_products(weight), targets, first, group)


class _DividedTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, first: int, group: ProcessGroup
    ) -> Tensor:
        own = hidden.new_zeros(2, len(hidden), dtype=wide(hidden.dtype))  # logarithm of the sum, logit of the target
        place, mine = _places(targets, first, len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            columns = wide_factor(weight).T
            for rows in chunks(len(hidden), CHUNK):
                logits = wide_product(hidden[rows], columns)  # (m, c)
                own[0, rows] = logits.logsumexp(1)
                if len(weight):
                    own[1, rows] = logits.gather(1, place[rows, None])[:, 0].masked_fill(~mine[rows], 0.0)
        found = gathered(own, group)  # (devices, 2, M)
        total = found[:, 0].logsumexp(0)  # (M,), over the whole vocabulary
        ctx.save_for_backward(hidden, weight, targets, total)
        ctx.first = first
        return (total - found[:, 1].sum(0)).masked_fill(targets < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, total = ctx.saved_tensors
        grad = grad.masked_fill(targets < 0, 0.0)
        place, mine = _places(targets, ctx.first, len(weight))
        grad_hidden = torch.zeros_like(hidden)
        # 16 bits would lose precision in the sum over chunks.
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            columns = wide_factor(weight).T
            for rows in chunks(len(hidden), CHUNK) if len(weight) else ():
                likelihoods = (wide_product(hidden[rows], columns) - total[rows, None]).exp_()  # (m, c)
                likelihoods.scatter_add_(1, place[rows, None], -mine[rows, None].to(likelihoods.dtype))
                slope = torch.mul(likelihoods, grad[rows, None], out=torch.empty_like(likelihoods, dtype=hidden.dtype))
                del likelihoods
                grad_hidden[rows] = slope @ weight
                grad_weight += narrow_product(slope.T, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _places(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """For each target its row in this device's part, 0 if it is another's, and whether it is this device's."""
    place = targets - first
    mine = (place >= 0) & (place < count) & (targets >= 0)
    return place.where(mine, 0), mine


def divided_rows(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """The rows of a table that this device has, and zeros for the tokens of others.

    Args:
        tokens: (...) int64 numbers of the whole vocabulary.
        weight: (c, d), this device's rows, one or more.
        first: number of the first of them in the whole vocabulary.

    Returns:
        (..., d). The sum over devices is the embedding.
    """
    place, mine = _places(tokens, first, len(weight))
    return torch.nn.functional.embedding(place, weight).masked_fill(~mine[..., None], 0.0)


def gathered_logits(hidden: Tensor, weight: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """Logits of the whole vocabulary on all devices, for sampling, without gradients.

    Args:
        hidden: (..., d), equal on all devices of the group.
        weight: (c, d), this device's rows; all devices but the last ones have equally many.
        tokens: size of the whole vocabulary, C.
        group: the devices that hold the vocabulary together.

    Returns:
        (..., C), in the dtype of `hidden`.
    """
    each = -(-tokens // dist.get_world_size(group))
    with torch.autocast(hidden.device.type, enabled=False):
        own = torch.nn.functional.linear(hidden, weight.to(hidden.dtype))  # (..., c)
    found = gathered(torch.nn.functional.pad(own, (0, each - own.shape[-1])), group)
    return found.movedim(0, -2).flatten(-2)[..., :tokens]
