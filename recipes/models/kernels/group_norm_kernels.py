"""Triton kernels of GroupNorm and SiLU in one for channels_last tensors, forward and backward.

PyTorch's CUDA GroupNorm takes contiguous memory only. In a channels_last network each norm therefore needs two copies,
and SiLU one more pass, all of them in float32 under autocast. Here the forward pass reads its input twice (the second
time mostly from the L2 cache) and writes the result once, in the dtype that the next layer takes. The backward pass
reads input and gradient twice and writes once. Sums are float32 and have a fixed order, so that a result depends only
on its inputs and on the number of multiprocessors of the device.

Each program processes some whole groups of one sample, whose channels are adjacent: the values of one row are a run of
up to 256 bytes. The program reads its rows once for the sums and once to apply them. If that gives too few programs
for the device (small batches), `splits` programs share the rows of a sample: one launch writes the sums per program
and channel, and a second launch combines and applies them.

Letters: N batch, C channels, H W grid, R = H W rows, G groups. Gradients: Wu and He 2018, equation 2, with
SiLU'(z) = s(z) (1 + z (1 - s(z))), s the logistic function.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.models.kernels.devices import on_device_of, processors_of

TILE = 4096  # elements per tile, which a program holds at once
WIDTH = 128  # maximum number of channels per program, unless one group has more
SPLITS = 16  # maximum number of programs per sample and channels: each reads the sums of all of them
PROGRAMS = 4  # programs per multiprocessor to aim for


@dataclass(frozen=True)
class KernelPlan:
    """How the work is divided among programs.

    Attributes:
        groups: whole groups per program.
        width: channels per tile, rounded up to a power of two.
        step: rows per tile, a power of two.
        splits: number of programs that share the rows of a sample.
        rows: rows per program, a multiple of `step`; the last program may have fewer.
        warps: warps per program.
    """

    groups: int
    width: int
    step: int
    splits: int
    rows: int
    warps: int


@functools.lru_cache(maxsize=1024)
def make_plan(
    samples: int,
    rows: int,
    channels: int,
    groups: int,
    processors: int,
    splits: int | None = None,
    tile: int = TILE,
    width: int = WIDTH,
    programs: int = PROGRAMS,
) -> KernelPlan:
    """A plan that depends only on the shapes. Nothing is tuned at run time, so that runs are reproducible.

    Args:
        samples: N.
        rows: R.
        channels: C.
        groups: G, a divisor of C.
        processors: multiprocessors of the device.
        splits: maximum number of programs that share the rows of a sample; None: enough to fill the device.
        tile: elements per tile.
        width: maximum number of channels per program, unless one group has more.
        programs: programs per multiprocessor to aim for.
    """
    group = channels // groups
    most = max(1, min(groups, 16, width // group))
    whole = next((count for count in range(most, 0, -1) if count * group % 8 == 0), most)  # for loads of 16 bytes
    width = triton.next_power_of_2(whole * group)
    step = max(1, min(tile // width, triton.next_power_of_2(rows)))
    if splits is None:
        wanted = triton.cdiv(programs * processors, samples * triton.cdiv(groups, whole))
        splits = max(1, min(wanted, rows // (4 * step)))  # a second launch needs some tiles per program to pay off
    part = triton.cdiv(triton.cdiv(rows, min(splits, SPLITS)), step) * step
    return KernelPlan(whole, width, step, triton.cdiv(rows, part), part, min(8, max(1, width * step // 512)))


@triton.jit
def _members(GROUP: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """[GROUPS, WIDTH] bool: whether a channel of the tile belongs to a group."""
    return (tl.arange(0, WIDTH) // GROUP)[None, :] == tl.arange(0, GROUPS)[:, None]


@triton.jit
def _over_groups(values, members):
    """[WIDTH] -> [WIDTH]: for each channel, the sum over its group."""
    sums = tl.sum(tl.where(members, values[None, :], 0.0), axis=1)
    return tl.sum(tl.where(members, sums[:, None], 0.0), axis=0)


@triton.jit
def _place(GROUP: tl.constexpr, PART: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """This program's sample, split and channels, and a mask of the channels that exist."""
    blocks: tl.constexpr = (C + PART * GROUP - 1) // (PART * GROUP)
    program = tl.program_id(0)  # adjacent programs take adjacent channels and share cache lines
    local = tl.arange(0, WIDTH)
    channel = (program % blocks) * (PART * GROUP) + local
    used = (local < PART * GROUP) & (channel < C)
    sample = (program // blocks // SPLITS).to(tl.int64)
    return sample, program // blocks % SPLITS, channel, used


@triton.jit
def _group_norm_forward(
    x, weight, bias, y, mean, rstd, part_mean, part_m2, total_rows, rows, eps,
    C: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PART_P2: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr,
    SUMS: tl.constexpr, APPLY: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """SUMS: means and squared deviations per channel. APPLY: combine them over groups and splits, and normalise."""
    sample, split, channel, used = _place(GROUP, PART, C, WIDTH, SPLITS)
    members = _members(GROUP, WIDTH, PART_P2)
    x += sample * total_rows * C
    first = split * rows
    last = tl.minimum(first + rows, total_rows)

    if SUMS:
        # Sums of differences from the first row, to avoid cancellation if the mean is far from 0.
        shift = tl.load(x + first * C + channel, mask=used, other=0.0).to(tl.float32)
        linear = tl.zeros((STEP, WIDTH), tl.float32)
        squares = tl.zeros((STEP, WIDTH), tl.float32)
        for start in range(first, last, STEP):
            row = start + tl.arange(0, STEP)
            inside = (row < last)[:, None] & used[None, :]
            value = tl.load(x + row[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value - shift[None, :], 0.0)
            linear += value
            squares += value * value
        count = (last - first).to(tl.float32)
        offset = tl.sum(linear, axis=0) / count
        channel_mean = shift + offset
        channel_m2 = tl.maximum(tl.sum(squares, axis=0) - count * offset * offset, 0.0)

    if SUMS and not APPLY:
        place = (sample * SPLITS + split) * C + channel
        tl.store(part_mean + place, channel_mean, mask=used)
        tl.store(part_m2 + place, channel_m2, mask=used)

    if APPLY:
        elements = tl.cast(total_rows * GROUP, tl.float32)  # a 1 x 1 grid makes total_rows a constant, which has no .to
        if SUMS:
            group_mean = _over_groups(count * channel_mean, members) / elements
            away = channel_mean - group_mean
            m2 = channel_m2 + count * away * away
        else:
            part = tl.arange(0, SPLITS_P2)
            counts = tl.maximum(tl.minimum(total_rows - part * rows, rows), 0).to(tl.float32)
            places = (sample * SPLITS + part)[:, None] * C + channel[None, :]
            present = (part < SPLITS)[:, None] & used[None, :]
            means = tl.load(part_mean + places, mask=present, other=0.0)
            m2s = tl.load(part_m2 + places, mask=present, other=0.0)
            group_mean = _over_groups(tl.sum(counts[:, None] * means, axis=0), members) / elements
            away = means - group_mean[None, :]
            m2 = tl.sum(tl.where(present, m2s + counts[:, None] * away * away, 0.0), axis=0)
        m2 = tl.where(used, m2, 0.0)
        group_rstd = tl.rsqrt(_over_groups(m2, members) / elements + eps)
        group = sample * (C // GROUP) + channel // GROUP
        write = used & (channel % GROUP == 0) & (split == 0)
        tl.store(mean + group, group_mean, mask=write)
        tl.store(rstd + group, group_rstd, mask=write)

        scale = group_rstd * tl.load(weight + channel, mask=used, other=0.0).to(tl.float32)
        add = tl.load(bias + channel, mask=used, other=0.0).to(tl.float32)
        y += sample * total_rows * C
        for start in range(first, last, STEP):
            row = start + tl.arange(0, STEP)
            inside = (row < last)[:, None] & used[None, :]
            at = row[:, None] * C + channel[None, :]
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            z = (value - group_mean[None, :]) * scale[None, :] + add[None, :]
            if SILU:
                z = z * tl.sigmoid(z)
            tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _normal_and_gradient(x, dy, at, inside, mean, rstd, weight, bias, SILU: tl.constexpr):
    """The normalised input, and the gradient with respect to the input of SiLU (0 outside the mask)."""
    normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        z = normal * weight[None, :] + bias[None, :]
        s = tl.sigmoid(z)
        gradient *= s * (1.0 + z * (1.0 - s))
    return normal, gradient


@triton.jit
def _group_norm_backward(
    x, dy, weight, bias, mean, rstd, dx, part_plain, part_normal, total_rows, rows,
    C: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PART_P2: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr,
    SUMS: tl.constexpr, APPLY: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """SUMS: sums over rows of the gradient, and of gradient times normalised input. APPLY: gradient of the input."""
    sample, split, channel, used = _place(GROUP, PART, C, WIDTH, SPLITS)
    members = _members(GROUP, WIDTH, PART_P2)
    x += sample * total_rows * C
    dy += sample * total_rows * C
    first = split * rows
    last = tl.minimum(first + rows, total_rows)
    group = sample * (C // GROUP) + channel // GROUP
    group_mean = tl.load(mean + group, mask=used, other=0.0)
    group_rstd = tl.load(rstd + group, mask=used, other=0.0)
    scale = tl.load(weight + channel, mask=used, other=0.0).to(tl.float32)
    add = tl.load(bias + channel, mask=used, other=0.0).to(tl.float32)

    if SUMS:
        plain = tl.zeros((STEP, WIDTH), tl.float32)
        weighted = tl.zeros((STEP, WIDTH), tl.float32)
        for start in range(first, last, STEP):
            row = start + tl.arange(0, STEP)
            inside = (row < last)[:, None] & used[None, :]
            at = row[:, None] * C + channel[None, :]
            normal, gradient = _normal_and_gradient(x, dy, at, inside, group_mean, group_rstd, scale, add, SILU)
            plain += gradient
            weighted += gradient * normal
        sum_plain = tl.sum(plain, axis=0)
        sum_normal = tl.sum(weighted, axis=0)
        place = (sample * SPLITS + split) * C + channel
        tl.store(part_plain + place, sum_plain, mask=used)
        tl.store(part_normal + place, sum_normal, mask=used)

    if APPLY:
        if not SUMS:
            part = tl.arange(0, SPLITS_P2)
            places = (sample * SPLITS + part)[:, None] * C + channel[None, :]
            present = (part < SPLITS)[:, None] & used[None, :]
            sum_plain = tl.sum(tl.load(part_plain + places, mask=present, other=0.0), axis=0)
            sum_normal = tl.sum(tl.load(part_normal + places, mask=present, other=0.0), axis=0)
        elements = tl.cast(total_rows * GROUP, tl.float32)
        mean_plain = _over_groups(scale * sum_plain, members) / elements
        mean_normal = _over_groups(scale * sum_normal, members) / elements
        dx += sample * total_rows * C
        for start in range(first, last, STEP):
            row = start + tl.arange(0, STEP)
            inside = (row < last)[:, None] & used[None, :]
            at = row[:, None] * C + channel[None, :]
            normal, gradient = _normal_and_gradient(x, dy, at, inside, group_mean, group_rstd, scale, add, SILU)
            change = scale[None, :] * gradient - mean_plain[None, :] - normal * mean_normal[None, :]
            tl.store(dx + at, (group_rstd[None, :] * change).to(dx.dtype.element_ty), mask=inside)


def _launch(kernel, plan: KernelPlan, x: Tensor, groups: int, silu: bool, *arguments) -> None:
    """Run a kernel in one launch, or in two if programs share the rows of a sample."""
    samples, channels = x.shape[:2]
    group = channels // groups
    constants = {
        "C": channels,
        "GROUP": group,
        "PART": plan.groups,
        "PART_P2": triton.next_power_of_2(plan.groups),
        "WIDTH": plan.width,
        "STEP": plan.step,
        "SPLITS": plan.splits,
        "SPLITS_P2": triton.next_power_of_2(plan.splits),
        "SILU": silu,
        "num_warps": plan.warps,
    }
    grid = (samples * plan.splits * triton.cdiv(groups, plan.groups),)
    passes = ((True, True),) if plan.splits == 1 else ((True, False), (False, True))
    with on_device_of(x):
        for sums, apply in passes:
            kernel[grid](*arguments, SUMS=sums, APPLY=apply, **constants)


def plan_for(x: Tensor, groups: int) -> KernelPlan:
    """The plan for x (N, C, H, W) on its device."""
    samples, channels, height, width = x.shape
    return make_plan(samples, height * width, channels, groups, processors_of(x.device))


def forward_with(
    plan: KernelPlan, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y (N, C, H, W) channels_last, and (2, N, G) float32: means and reciprocal standard deviations."""
    samples, channels, height, width = x.shape
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
    stats = x.new_empty((2, samples, groups), dtype=torch.float32)
    shared = plan.splits > 1  # a single program keeps its sums in registers
    parts = x.new_empty((2, samples, plan.splits, channels) if shared else (2, 1), dtype=torch.float32)
    arguments = (x, weight, bias, y, *stats.unbind(), *parts.unbind(), height * width, plan.rows, eps)
    _launch(_group_norm_forward, plan, x, groups, silu, *arguments)
    return y, stats


def backward_with(
    plan: KernelPlan, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, groups: int, silu: bool
) -> tuple[Tensor, Tensor]:
    """dx, shaped like x, and (2, C) float32: the gradients of bias and weight."""
    samples, channels, height, width = x.shape
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    parts = x.new_empty((2, samples, plan.splits, channels), dtype=torch.float32)
    arguments = (x, dy, weight, bias, *stats.unbind(), dx, *parts.unbind(), height * width, plan.rows)
    _launch(_group_norm_backward, plan, x, groups, silu, *arguments)
    return dx, parts.sum((1, 2))
