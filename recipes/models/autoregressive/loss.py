"""Cross-entropy of tokens in float32, without holding the logits of all positions at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # rows whose logits are in memory at once: 100 MB for 24,576 tokens
# cuBLAS can multiply 16-bit matrices into float32 results; torch offers it since 2.8.
WIDE_PRODUCT = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """The negative log-likelihood of each row's target under softmax(hidden @ weight.T).

    The logits are computed one chunk of rows at a time, and once more in the backward pass. Under autocast the factors
    are rounded to its dtype; products are accumulated and kept in float32.

    Args:
        hidden: (M, d).
        weight: (C, d), the unembedding.
        targets: (M,) int64 in [0, C), or -1 for rows whose loss and gradient are 0.
        chunk: rows per chunk.

    Returns:
        (M,), float32, or float64 if the factors are.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return _TokenLosses.apply(hidden, weight, targets, chunk)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        losses = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
        normalisers = torch.empty_like(losses)  # log-sum-exp of the logits
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(len(hidden), chunk):
                logits = _logits(hidden[rows], weight)  # (m, C)
                normalisers[rows] = logits.logsumexp(1)
                losses[rows] = normalisers[rows] - logits.gather(1, targets[rows, None].clamp(min=0))[:, 0]
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.chunk = chunk
        return losses.masked_fill(targets < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        grad = grad.masked_fill(targets < 0, 0.0)
        grad_hidden = torch.empty_like(hidden)
        # 16 bits would lose precision in the sum over chunks.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(len(hidden), ctx.chunk):
                slope = _logits(hidden[rows], weight).sub_(normalisers[rows, None]).exp_()  # p, (m, C)
                slope.scatter_add_(1, targets[rows, None].clamp(min=0), slope.new_full((len(slope), 1), -1.0))
                slope = slope.mul_(grad[rows, None]).to(hidden.dtype)
                grad_hidden[rows] = slope @ weight
                grad_weight += slope.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(m, C), float32 or wider."""
    if hidden.dtype == _wide(hidden.dtype):
        return hidden @ weight.T
    if WIDE_PRODUCT and hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    # 16-bit numbers fit into TF32, whose products are therefore exact if TF32 is allowed.
    return hidden.float() @ weight.float().T


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, rows, size)]
