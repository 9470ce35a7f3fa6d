"""A Triton kernel that updates all tensors of a parameter group in one launch, with moments in any of the formats.

A model has hundreds of small tensors, and launching one kernel for each would take longer than the memory traffic. Here
a table holds the addresses of all tensors, and each program updates a piece of one of them. The arithmetic is that of
`adam16.adamw_update` and `formats.Format16`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.algorithms.sixteen_bit.formats import Format, Format16
from recipes.algorithms.sixteen_bit.formats_kernel import decode_tile, encode_tile
from recipes.models.kernels.devices import on_device_of
from recipes.training.transfer import sent

PIECE = 8192  # elements per program
TILE = 1024  # elements that a program handles at a time
ALIGNMENT = 16  # bytes of the widest load and store; the sizes of tensors that take those are multiples, too


@triton.jit
def _update(
    addresses,  # (tensors, 4) int64: values, gradient, mean, variance
    sizes,  # (tensors,) int64
    owners,  # (programs,) int32: index of the tensor that each program updates
    starts,  # (programs,) int64: the first element of its piece
    decay,
    step_size,
    root_correction,
    mean_share,  # 1 - beta1 and 1 - beta2 as the host computes them: 32 bits would leave few digits of the difference
    beta2,
    variance_share,
    eps,
    clip,
    MEAN_SIGNIFICAND: tl.constexpr,
    MEAN_BIAS: tl.constexpr,
    MEAN_LEAST: tl.constexpr,
    VARIANCE_SIGNIFICAND: tl.constexpr,
    VARIANCE_BIAS: tl.constexpr,
    VARIANCE_LEAST: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether `ALIGNMENT` divides all addresses, and all sizes
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start = tl.load(starts + program)
    size = tl.load(sizes + owner)
    start = tl.multiple_of(start, PIECE)
    values = tl.load(addresses + 4 * owner).to(tl.pointer_type(tl.float32))
    gradients = tl.load(addresses + 4 * owner + 1).to(tl.pointer_type(tl.float32))
    if MEAN_SIGNIFICAND == 23:
        means = tl.load(addresses + 4 * owner + 2).to(tl.pointer_type(tl.float32))
        variances = tl.load(addresses + 4 * owner + 3).to(tl.pointer_type(tl.float32))
    else:
        means = tl.load(addresses + 4 * owner + 2).to(tl.pointer_type(tl.int16))
        variances = tl.load(addresses + 4 * owner + 3).to(tl.pointer_type(tl.int16))
    # Triton knows nothing of addresses from a table. With these it reads and writes 16 bytes per thread at a time.
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        values, gradients = tl.multiple_of(values, 16), tl.multiple_of(gradients, 16)
        means, variances = tl.multiple_of(means, 16), tl.multiple_of(variances, 16)
    for tile in range(0, PIECE, TILE):
        at = start + tile + tl.arange(0, TILE)
        inside = at < size
        value = tl.load(values + at, inside, other=0.0)
        gradient = tl.load(gradients + at, inside, other=0.0)
        mean = decode_tile(tl.load(means + at, inside, other=0), True, MEAN_SIGNIFICAND, MEAN_BIAS, MEAN_LEAST)
        variance = decode_tile(
            tl.load(variances + at, inside, other=0), False, VARIANCE_SIGNIFICAND, VARIANCE_BIAS, VARIANCE_LEAST
        )
        mean = mean + mean_share * (gradient - mean)
        variance = variance * beta2 + variance_share * gradient * gradient
        # Like torch.clamp, this keeps NaN, which a minimum would hide.
        variance = tl.where(variance > clip, clip, variance)
        root = tl.sqrt(variance) / root_correction + eps
        tl.store(values + at, value - (decay * value + step_size * (mean / root)), inside)
        tl.store(means + at, encode_tile(mean, True, MEAN_SIGNIFICAND, MEAN_BIAS, MEAN_LEAST), inside)
        tl.store(
            variances + at,
            encode_tile(variance, False, VARIANCE_SIGNIFICAND, VARIANCE_BIAS, VARIANCE_LEAST),
            inside,
        )


def update_all(
    tensors: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    scalars: tuple[float, float, float],
    formats: tuple[Format, Format],
    betas: tuple[float, float],
    eps: float,
    variance_clip: float | None,
) -> None:
    """One step of AdamW on many tensors, in place, in one launch; tensors of odd sizes or addresses take another one.

    Args:
        tensors: values and gradient of N elements, and the codes of mean and variance, also as bytes; all dense on one
            device, in the same memory order.
        scalars: decay, step size and root correction, as in `adamw_update`.
        formats: formats of the codes of mean and variance.
        betas: decays of mean and variance.
        eps: added to the square root of the variance.
        variance_clip: upper bound of the variance, or None.
    """
    beta1, beta2 = betas
    clip = float("inf") if variance_clip is None else variance_clip
    numbers = (*scalars, 1 - beta1, beta2, 1 - beta2, eps, clip)
    constants = [number for fmt in formats for number in _constants(fmt)]
    for aligned in (True, False):  # in nearly all models, all tensors are
        chosen = [parts for parts in tensors if _is_aligned(parts) == aligned]
        if chosen:
            _launch(chosen, numbers, constants, aligned)


def _launch(
    tensors: list[tuple[Tensor, Tensor, Tensor, Tensor]], numbers: tuple[float, ...], constants: list, aligned: bool
) -> None:
    device = tensors[0][0].device
    size_table, owners, starts = _pieces(tuple(values.numel() for values, *_ in tensors), device)
    addresses = sent([[t.data_ptr() for t in parts] for parts in tensors], torch.int64, device)
    with on_device_of(tensors[0][0]):
        _update[(len(owners),)](
            addresses, size_table, owners, starts, *numbers, *constants, ALIGNED=aligned, PIECE=PIECE, TILE=TILE
        )


def _is_aligned(parts: tuple[Tensor, ...]) -> bool:
    return parts[0].numel() % ALIGNMENT == 0 and all(t.data_ptr() % ALIGNMENT == 0 for t in parts)


@functools.lru_cache(maxsize=64)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments `sizes`, `owners` and `starts` of the kernel."""
    counts = torch.tensor([-(-size // PIECE) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.cumsum(counts, 0) - counts
    starts = (torch.arange(len(owners)) - first[owners]) * PIECE
    return torch.tensor(sizes).to(device), owners.to(device, torch.int32), starts.to(device)


def _constants(fmt: Format) -> tuple[int, int, float]:
    return (fmt.significand, fmt.bias, fmt.least) if isinstance(fmt, Format16) else (23, 127, 0.0)
