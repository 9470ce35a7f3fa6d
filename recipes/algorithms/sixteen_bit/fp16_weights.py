"""Weights and gradients that are stored in 16 bits (Ramesh et al. 2021, section 2.4 and appendix D).

The gradient of such a weight carries the scale of its block until the optimizer reads it: divided by the scale in 16
bits, small gradients would underflow. What reads gradients asks this file for the factor that they carry.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def store(matrices: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Store weights, and from now on their gradients, in float16. The parameters stay the same objects.

    Args:
        matrices: float32 parameters.
        factor: () float32, by which their gradients are multiplied; read when gradients are used.
    """
    for parameter in matrices:
        parameter.data = parameter.data.to(torch.float16)
        parameter.gradient_factor = factor


def factor_of(parameter: Tensor) -> Tensor | None:
    """The factor in a parameter's gradient, () float32; None: the gradient is as it is."""
    return getattr(parameter, "gradient_factor", None)


@torch.no_grad()
def clip(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Clip gradients, some of which carry factors, by the L2 norm of the whole gradient without its factors.

    16-bit gradients do not change. Their factors do, each of which all gradients of its block share.

    Args:
        parameters: ordinary tensors; those without a gradient are ignored.
        largest: norm from which on gradients are clipped.

    Returns:
        The norm before, () float32.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:  # the update is skipped
        return torch.zeros(())
    factors = {f.data_ptr(): f for f in map(factor_of, parameters) if f is not None}
    norms = []
    for parameter in parameters:
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        factor = factor_of(parameter)
        norms.append(norm if factor is None else norm / factor)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    share = (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    ordinary = [p.grad for p in parameters if factor_of(p) is None]
    if ordinary:  # PyTorch refuses an empty list
        torch._foreach_mul_(ordinary, share)
    for factor in factors.values():
        factor.div_(share)
    return norm
