"""Triton kernels of GEGLU, forward and backward: y = h gelu(g) for the two halves h, g of each row.

PyTorch runs two kernels forward and five backward, among them the concatenation of the two gradients, and keeps gelu(g)
for the backward pass. Here one kernel each reads and writes every number once and computes in float32.

gelu(g) = g P(g) with the cumulative normal distribution P(g) = (1 + erf(g / sqrt 2)) / 2 (Hendrycks and Gimpel 2016,
without approximation), so gelu'(g) = P(g) + g exp(-g^2 / 2) / sqrt(2 pi). GEGLU: Shazeer 2020.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.models.kernels.devices import on_device_of

BLOCK = 1024  # elements of y per program
WARPS = 4


@triton.jit
def _place(total, N: tl.constexpr, BLOCK: tl.constexpr):
    """This program's elements of y (M, N), a mask of those that exist, and where h and g of them are in x (M, 2 N)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < total, at + (at // N) * N


@triton.jit
def _geglu_forward(x, y, total, N: tl.constexpr, BLOCK: tl.constexpr):
    at, inside, place = _place(total, N, BLOCK)
    h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(x + place + N, mask=inside, other=0.0).to(tl.float32)
    p = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    tl.store(y + at, (h * g * p).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _geglu_backward(x, dy, dx, total, N: tl.constexpr, BLOCK: tl.constexpr):
    at, inside, place = _place(total, N, BLOCK)
    h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(x + place + N, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    p = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    slope = p + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    tl.store(dx + place, (d * g * p).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + place + N, (d * h * slope).to(dx.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> Tensor:
    """y (..., N) of x (..., 2 N), contiguous."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _launch(_geglu_forward, y.numel(), y.shape[-1], x, y)
    return y


def backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x (..., 2 N) for that of y (..., N), both contiguous."""
    dx = torch.empty_like(x)
    _launch(_geglu_backward, dy.numel(), dy.shape[-1], x, dy, dx)
    return dx


def _launch(kernel, total: int, width: int, *tensors: Tensor) -> None:
    if total:
        with on_device_of(tensors[0]):
            kernel[(triton.cdiv(total, BLOCK),)](*tensors, total, N=width, BLOCK=BLOCK, num_warps=WARPS)
