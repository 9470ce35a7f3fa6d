"""Linear layers whose matrix products have 8-bit factors.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning": e4m3 for weights and activations, e5m2 for gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.system.log import log
from recipes.training.compiled import result
from recipes.training.lever import Lever
from recipes.training.run import Run

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # activations and weights; gradients, which vary more
MULTIPLE = 16  # sides of the matrices that tensor cores multiply in 8 bits
CAPABILITY = (8, 9)  # Ada; Hopper has (9, 0)
LEAST = 2.0**-100  # magnitude whose scale is still finite


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits, and the factor that restores it: x is about q * factor.

    There is one scale for the whole tensor, which makes its largest magnitude that of the format. It is computed from
    the tensor itself, so nothing has to be kept between steps. If a value is not finite, all products become NaN.

    Args:
        x: (..., K), 16 or 32 bits.
        dtype: the 8-bit format.

    Returns:
        q: of the shape of x, contiguous.
        factor: () float32.
    """
    largest = torch.finfo(dtype).max
    # By rows first: torch 2.7's compiler fails on one maximum over all of a tensor that was padded before.
    scale = largest / x.abs().amax(-1).amax().float().clamp(min=LEAST)
    q = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return q.contiguous(), scale.reciprocal()


def product(
    a: Tensor, b: Tensor, factors: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a @ b times the product of the factors, summed in float32.

    Args:
        a: (M, K) in 8 bits, in row-major order.
        b: (K, N) in 8 bits, in column-major order. K and N are multiples of 16.
        factors: of a and of b, () float32 each. They must not be views of one tensor, with which the compiler of torch
            2.11 fails on a GPU.
        dtype: of the result.
        fast: a GPU may add with fewer bits, as is usual in forward passes.

    Returns:
        (M, N).
    """
    if not a.is_cuda:  # the same numbers, without the speed
        return (a.float() @ b.float() * (factors[0] * factors[1])).to(dtype)
    return torch._scaled_mm(a, b, scale_a=factors[0], scale_b=factors[1], out_dtype=dtype, use_fast_accum=fast)


class _Linear(torch.autograd.Function):
    """x (M, K), weight (N, K) -> x @ weight.T, (M, N). All three products of a step have 8-bit factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        q, q_factor = quantise(x, FORWARD)
        w, w_factor = quantise(weight, FORWARD)
        ctx.save_for_backward(q, q_factor, weight)
        ctx.dtype = x.dtype
        return result(product(q, w.T, (q_factor, w_factor), dtype, fast=True))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, q_factor, weight = ctx.saved_tensors
        g, g_factor = quantise(grad, BACKWARD)  # (M, N)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w, w_factor = quantise(weight, FORWARD)
            grad_x = product(g, _columns(w), (g_factor, w_factor), ctx.dtype)  # (M, K)
        if ctx.needs_input_grad[1]:
            factors = (g_factor, q_factor)
            grad_weight = product(g.T.contiguous(), _columns(q), factors, weight.dtype)  # (N, K)
        return grad_x, grad_weight, None


def _columns(x: Tensor) -> Tensor:
    """The same matrix in column-major order."""
    return x.T.contiguous().T


class Fp8Linear(nn.Linear):
    """A linear layer that trains with 8-bit factors. Without gradients, it is an ordinary one.

    Weights, biases and their gradients keep their dtypes. The result has that of autocast or, without, of the input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        if x.ndim == 1:
            return self(x[None])[0]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.flatten(0, -2)
        count = len(rows)
        if count % MULTIPLE:  # padding by no rows would copy them, too
            rows = F.pad(rows, (0, 0, 0, -count % MULTIPLE))
        with torch.autocast(kind, enabled=False):
            y = _Linear.apply(rows, self.weight, dtype)[:count]
            y = y if self.bias is None else y + self.bias.to(dtype)
        return y.unflatten(0, x.shape[:-1])


class Fp8(Lever):
    """Multiplies the matrices of a model's blocks in 8 bits, with one scale per tensor; needs compute capability 8.9.

    Forward, factors are e4m3; backward, gradients are e5m2. Sums have 32 bits, and weights, their gradients and the
    optimizer keep their formats. On a CPU, the same numbers are computed in 32 bits. Only `nn.Linear` is changed; a
    line in the log says what share of the blocks' matrices that is.
    """

    def __init__(self, task: nn.Module) -> None:
        """`task` names the blocks whose linear layers change."""
        self.task = task

    def check_machine(self, run: Run) -> None:
        if run.on_gpu:
            check_capability(torch.cuda.get_device_capability(run.device))

    def change_modules(self, run: Run) -> None:
        linear = [m for block in self.task.blocks() for m in block.modules() if type(m) is nn.Linear]
        chosen = [m for m in linear if m.in_features % MULTIPLE == 0 and m.out_features % MULTIPLE == 0]
        if not chosen:
            raise ValueError(
                f"fp8: nothing to change: the blocks of {type(self.task).__name__} have no linear layers with "
                f"numbers of features that are multiples of {MULTIPLE}; remove the lever"
            )
        for module in chosen:
            module.__class__ = Fp8Linear  # parameters, hooks and names in checkpoints stay
        # Matrices that a module of one's own multiplies by itself stay as they are, and nothing else would say so.
        matrices = {p for block in self.task.blocks() for p in block.parameters() if p.ndim > 1}
        share = sum(p.numel() for p in {m.weight for m in chosen}) / sum(p.numel() for p in matrices)
        log.info(
            f"fp8: {len(chosen)} linear layers, which have {share:.0%} of the elements of all matrices in the blocks"
            f"{'' if run.on_gpu else '; emulated'}"
        )
        run.log_settings({"fp8": len(chosen)})


def check_capability(found: tuple[int, int]) -> None:
    """
    Raises:
        ValueError: the GPU does not multiply in 8 bits.
    """
    if found < CAPABILITY:
        raise ValueError(
            f"fp8: the GPU has compute capability {found[0]}.{found[1]}, and 8-bit products need "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (Ada, Hopper or later); remove the lever"
        )
