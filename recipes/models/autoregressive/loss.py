"""Cross-entropy of tokens in float32, without holding the logits of all positions at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recipes.models.autocast import for_products

CHUNK = 4096  # rows whose logits are in memory at once: 400 MB for 24,576 tokens, and as much for their softmax
# cuBLAS can multiply 16-bit matrices into float32 results; torch offers it since 2.8.
WIDE_PRODUCT = torch.__version__ >= (2, 8)


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
    return _TokenLosses.apply(for_products(hidden), for_products(weight), targets, chunk)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        losses = hidden.new_empty(len(hidden), dtype=wide(hidden.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            columns = wide_factor(weight).T
            for rows in chunks(len(hidden), chunk):
                logits = wide_product(hidden[rows], columns)  # (m, C)
                losses[rows] = nn.functional.cross_entropy(logits, targets[rows], ignore_index=-1, reduction="none")
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets < 0, 0.0)
        grad_hidden = torch.empty_like(hidden)
        # 16 bits would lose precision in the sum over chunks.
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            columns = wide_factor(weight).T
            for rows in chunks(len(hidden), ctx.chunk):
                likelihoods = wide_product(hidden[rows], columns).softmax(1)  # (m, C)
                at_target = targets[rows, None].clamp(min=0)
                likelihoods.scatter_add_(1, at_target, likelihoods.new_full(at_target.shape, -1.0))
                slope = torch.mul(likelihoods, grad[rows, None], out=torch.empty_like(likelihoods, dtype=hidden.dtype))
                del likelihoods
                grad_hidden[rows] = slope @ weight
                grad_weight += narrow_product(slope.T, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider: the products of 16-bit numbers, which are exact, and their sums.

    Args:
        a: (M, K).
        b: (K, N), of the same dtype or already as float32.
    """
    if a.dtype == wide(a.dtype):
        return a @ b
    if b.dtype == a.dtype and _has_wide_product(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    with _tf32(a.device):
        return a.float() @ b.float()


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply in TF32, several times as fast as float32, and as exact for 16-bit numbers, which it holds."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def wide_factor(weight: Tensor) -> Tensor:
    """The weight as `wide_product` multiplies it, cast once and not per chunk."""
    return weight if _has_wide_product(weight) else weight.to(wide(weight.dtype))


def _has_wide_product(x: Tensor) -> bool:
    return WIDE_PRODUCT and x.is_cuda


def narrow_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in float32, and rounded to 16 bits only where PyTorch cannot return the sum."""
    return wide_product(a, b) if _has_wide_product(a) else a @ b


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products are added: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def chunks(rows: int, size: int) -> list[slice]:
    """Slices of at most `size` rows, in order."""
    return [slice(start, start + size) for start in range(0, rows, size)]
