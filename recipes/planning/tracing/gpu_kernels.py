"""Attention and dropout, which are one kernel each on a GPU, but several operations or none on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Fused kernels keep no scores: the backward pass computes them again, then four products of their size, where the
# forward pass has two.
ATTENTION_BACKWARD = 2.5

Record = Callable[[float, Iterable[Tensor]], None]


class GpuKernels(TorchFunctionMode):
    """A mode in which attention is recorded as one operation, and dropout is the operation that a GPU has for it."""

    def __init__(self, record: Record) -> None:
        """
        Args:
            record: called for each attention, in the forward and in the backward pass, with its FLOPs and the tensors
                that it reads and writes.
        """
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], self.record)
        if func is nn.functional.dropout:
            return _dropped(*args, **kwargs)
        return func(*args, **kwargs)


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as CUDA has it, which keeps a byte per value. Other devices multiply by numbers that they draw."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _Attention(torch.autograd.Function):
    """softmax(q k^T) v without the scores: q (..., S, D), k (..., T, D), v (..., T, E) -> (..., S, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, record: Record) -> Tensor:
        # Kernels write the result in the order of the queries' memory, so that joining the heads copies nothing.
        result = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)  # one logarithm per query, of its softmax's sum
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.record = record
        record(_flops(q, k, v), (q, k, v, result, sums))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        ctx.record(ATTENTION_BACKWARD * _flops(q, k, v), (q, k, v, *rest, gradient, *gradients))
        return *gradients, None


def _flops(q: Tensor, k: Tensor, v: Tensor) -> float:
    rows = q.numel() // q.shape[-1]
    return 2.0 * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1])
