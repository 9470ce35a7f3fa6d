"""Triton kernels that encode and decode 16-bit formats on a GPU, reading and writing each number once.

The arithmetic is that of `formats.Format16`, operation by operation. With one kernel of PyTorch per operation, the
numbers would pass through memory some twenty times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.models.kernels.devices import on_device_of

TILE = 1024  # elements per program


@triton.jit
def decode_tile(codes, SIGNED: tl.constexpr, SIGNIFICAND: tl.constexpr, BIAS: tl.constexpr, LEAST: tl.constexpr):
    if SIGNIFICAND == 23:  # 32-bit: the codes are the values
        values = codes
    else:
        MASK: tl.constexpr = 0x7FFF if SIGNED else 0xFFFF
        magnitude = codes.to(tl.int32) & MASK
        normal = ((magnitude << (23 - SIGNIFICAND)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < (1 << SIGNIFICAND), magnitude.to(tl.float32) * LEAST, normal)
        if SIGNED:  # as a bit, because negating 0 in Triton gives 0 and not -0
            sign = (codes.to(tl.int32) & 0x8000) << 16
            values = (values.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return values


@triton.jit
def encode_tile(values, SIGNED: tl.constexpr, SIGNIFICAND: tl.constexpr, BIAS: tl.constexpr, LEAST: tl.constexpr):
    if SIGNIFICAND == 23:
        codes = values
    else:
        SHIFT: tl.constexpr = 23 - SIGNIFICAND
        OFFSET: tl.constexpr = (127 - BIAS) << 23
        MASK: tl.constexpr = 0x7FFF if SIGNED else 0xFFFF
        RULER: tl.constexpr = LEAST * 8388608.0
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        nothing = magnitude > 0x7F800000
        if not SIGNED:
            nothing = nothing | (bits < 0)
        magnitude = tl.where(nothing, 0, tl.minimum(magnitude, (MASK << SHIFT) + OFFSET))
        half = (1 << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1)
        normal = (magnitude - OFFSET + half) >> SHIFT
        subnormal = (magnitude.to(tl.float32, bitcast=True) + RULER).to(tl.int32, bitcast=True)
        wide = tl.where(magnitude < (1 << 23) + OFFSET, subnormal, normal)
        if SIGNED:
            wide = wide | ((bits >> 16) & 0x8000)
        codes = wide.to(tl.int16)
    return codes


@triton.jit
def _encode(
    values,
    codes,
    size,
    SIGNED: tl.constexpr,
    SIGNIFICAND: tl.constexpr,
    BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    value = tl.load(values + at, inside, other=0.0)
    tl.store(codes + at, encode_tile(value, SIGNED, SIGNIFICAND, BIAS, LEAST), inside)


@triton.jit
def _decode(
    values,
    codes,
    size,
    SIGNED: tl.constexpr,
    SIGNIFICAND: tl.constexpr,
    BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    code = tl.load(codes + at, inside, other=0)
    tl.store(values + at, decode_tile(code, SIGNED, SIGNIFICAND, BIAS, LEAST), inside)


def encode(values: Tensor, constants: tuple[bool, int, int, float]) -> Tensor:
    """As `Format16.encode`.

    Args:
        values: (...) float32, in any memory order.
        constants: `Format16.constants`: signed, significand bits, exponent bias, smallest value above zero.
    """
    codes = torch.empty_like(values, dtype=torch.int16)
    if codes.stride() != values.stride():  # a view with gaps; dense tensors keep their memory order
        values = values.contiguous()
        codes = torch.empty_like(values, dtype=torch.int16)
    return _launch(_encode, values, codes, constants, codes)


def decode(codes: Tensor, constants: tuple[bool, int, int, float]) -> Tensor:
    """As `Format16.decode`.

    Args:
        codes: (...) int16, in any memory order.
        constants: as in `encode`.
    """
    values = torch.empty_like(codes, dtype=torch.float32)
    if values.stride() != codes.stride():
        codes = codes.contiguous()
        values = torch.empty_like(codes, dtype=torch.float32)
    return _launch(_decode, values, codes, constants, values)


def _launch(
    kernel: triton.JITFunction,
    values: Tensor,
    codes: Tensor,
    constants: tuple[bool, int, int, float],
    made: Tensor,
) -> Tensor:
    if made.numel():  # a shard may be empty
        with on_device_of(made):
            kernel[(triton.cdiv(made.numel(), TILE),)](values, codes, made.numel(), *constants, TILE=TILE)
    return made
