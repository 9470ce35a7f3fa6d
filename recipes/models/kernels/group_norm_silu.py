"""GroupNorm and SiLU in one operation for channels_last tensors, with gradients. Kernels: `group_norm_kernels`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from recipes.models.kernels import group_norm_kernels as kernels
from recipes.models.kernels.group_norm_kernels import backward_with, forward_with, plan_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# With TRITON_INTERPRET=1, set before the first import of triton, the kernels run on the CPU, slowly: for tests.
INTERPRETED = not isinstance(kernels._group_norm_forward, triton.JITFunction)


class _GroupNormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, groups, eps, silu, dtype):
        y, stats = forward_with(plan_for(x, groups), x, weight, bias, groups, eps, silu, dtype)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.groups, ctx.silu = groups, silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, stats = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, parameters = backward_with(plan_for(x, ctx.groups), dy, x, weight, bias, stats, ctx.groups, ctx.silu)
        dbias, dweight = parameters.unbind()
        return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None, None


# The same as custom operators, which torch.compile does not trace into. Eager runs would pay 0.1 ms of CPU per call.
@torch.library.custom_op("precompose::group_norm_silu", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    return forward_with(plan_for(x, groups), x, weight, bias, groups, eps, silu, dtype)


@_forward_op.register_fake
def _(x, weight, bias, groups, eps, silu, dtype):
    stats = x.new_empty((2, x.shape[0], groups), dtype=torch.float32)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last), stats


@torch.library.custom_op("precompose::group_norm_silu_backward", mutates_args=())
def _backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, groups: int, silu: bool
) -> tuple[Tensor, Tensor]:
    dy, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (dy, x))
    return backward_with(plan_for(x, groups), dy, x, weight, bias, stats, groups, silu)


@_backward_op.register_fake
def _(dy, x, weight, bias, stats, groups, silu):
    gradients = x.new_empty((2, x.shape[1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), gradients


def _save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.groups, _, ctx.silu, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _gradients(ctx, dy: Tensor, _: Tensor | None):
    x, weight, bias, stats = ctx.saved_tensors
    dx, parameters = _backward_op(dy, x, weight, bias, stats, ctx.groups, ctx.silu)
    dbias, dweight = parameters.unbind()
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """SiLU(GroupNorm(x)), computed in float32 by the kernels in `group_norm_kernels`, with gradients.

    Args:
        x: (N, C, H, W), float32, bfloat16 or float16; copied to channels_last if it is not.
        weight: (C,), of one of the same dtypes.
        bias: (C,).
        groups: G, a divisor of C.
        eps: added to the variance.
        silu: whether to apply SiLU after the norm.
        dtype: dtype of the result; None: that of x.

    Returns:
        (N, C, H, W), channels_last.

    Raises:
        ValueError: shapes, dtypes or a device that the kernels do not take.
    """
    dtype = dtype or x.dtype
    if x.dim() != 4 or x.shape[1] % groups or weight.shape != (x.shape[1],) or bias.shape != weight.shape:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}, groups {groups}"
        raise ValueError(
            f"group_norm_silu: x must be (N, C, H, W), weight and bias (C,), groups divide C; got {shapes}"
        )
    wrong = {d for d in (x.dtype, weight.dtype, bias.dtype, dtype) if d not in DTYPES}
    if wrong:
        raise ValueError(f"group_norm_silu: takes float32, bfloat16 and float16, got {wrong}")
    if (size := x.shape[1:].numel()) >= 2**31:
        raise ValueError(f"group_norm_silu: a sample has {size} elements; the kernels index fewer than 2^31")
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(f"group_norm_silu: the kernels need a GPU, x is on {x.device}")
    # Converted here, so that the tensor saved for the backward pass has the format that it needs.
    x = x.contiguous(memory_format=torch.channels_last)
    if x.numel() == 0:  # the kernels would have nothing to divide among programs
        y = F.group_norm(x.float(), groups, weight.float(), bias.float(), eps)
        return (F.silu(y) if silu else y).to(dtype, memory_format=torch.channels_last)
    if torch.compiler.is_compiling():
        return _forward_op(x, weight, bias, groups, eps, silu, dtype)[0]
    return _GroupNormSiLU.apply(x, weight, bias, groups, eps, silu, dtype)
