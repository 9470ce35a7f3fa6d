"""GEGLU in one operation, with gradients. Kernels: `geglu_kernels`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from recipes.models.kernels import geglu_kernels as kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# With TRITON_INTERPRET=1, set before the first import of triton, the kernels run on the CPU, slowly: for tests.
INTERPRETED = not isinstance(kernels._geglu_forward, triton.JITFunction)


class _GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return kernels.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return kernels.backward(*ctx.saved_tensors, dy.contiguous())


def geglu(x: Tensor) -> Tensor:
    """h gelu(g) (..., N) for the halves h, g of the last dimension of x (..., 2 N), computed in float32.

    Where the kernels do not run, on a CPU, in other dtypes and in code that is compiled (the compiler fuses the same),
    PyTorch computes it.

    Raises:
        ValueError: the last dimension is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"geglu: the last dimension of {tuple(x.shape)} has no two halves")
    runs = (x.is_cuda or INTERPRETED) and x.dtype in DTYPES and not torch.compiler.is_compiling()
    return _GEGLU.apply(x.contiguous()) if runs else reference(x)


def reference(x: Tensor) -> Tensor:
    """The same as `geglu`, computed by PyTorch in the dtype of x."""
    h, g = x.chunk(2, dim=-1)
    return h * F.gelu(g)
