"""What a recipe's levers change of the tensors that a pass keeps, for a model on the meta device.

Other levers that fuse operations or compile may keep less than that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipes.algorithms.modules.fused_geglu import FusedGEGLU, fuse_gates
from recipes.algorithms.modules.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm, lower_norms
from recipes.config.recipe import Recipe
from recipes.models.autoregressive.sparse_attention import ByColumns
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.blocks.norms import fuse_group_norms
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.task import Task
from recipes.planning.tracing.autocast import DTYPE


def apply_levers(recipe: Recipe, task: Task) -> None:
    """Change a model in place.

    Args:
        recipe: with the levers.
        task: on the meta device.

    Raises:
        ValueError: a lever finds nothing to change.
    """
    for lever in recipe.algorithms.values():
        if lever.name == "low_precision_norms":
            lower_norms(task, **lever.args)
        elif lever.name == "fused_geglu":
            fuse_gates(task)
        elif lever.name == "fused_group_norm" and lever.args.get("when") == "always":
            fuse_group_norms(task, measured=False)  # auto decides by time, and may keep all of them as they are
    # Where a GPU computes all keys, too (see `sparse_attention.resolve`), that is more than it takes.
    if isinstance(task, Autoregressive) and recipe.model.args.get("attention", "auto") != "masked":
        _order_columns(task)
    # On a GPU, PyTorch's norm copies what is in channels_last into contiguous memory. Without lean blocks diffusers has
    # done so before.
    copied = {"channels_last", "lean_blocks"} <= {lever.name for lever in recipe.algorithms.values()}
    for module in task.modules():
        if isinstance(module, FusedGEGLU):
            module.forward = partial(_gate, module)
        elif isinstance(module, FusedGroupNorm):
            module.forward = partial(_norm_and_silu, module)
        elif isinstance(module, nn.GroupNorm | nn.LayerNorm):
            low = isinstance(module, LowPrecisionGroupNorm | LowPrecisionLayerNorm)
            module.forward = partial(_norm, module, low, copied and isinstance(module, nn.GroupNorm))


def _order_columns(task: Autoregressive) -> None:
    """Let column layers transpose their grid, which keeps a second copy of attention's results."""
    network, device = task.network, torch.device("meta")
    attends = network.attends_on(device)
    network._attends[device] = [
        _Columns(network.layout) if kind == "column" else attend
        for kind, attend in zip(network.kinds, attends, strict=True)
    ]


class _Columns(ByColumns):
    """Attention in column order as one operation."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its input, and computes what else its gradients need from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int, dimension: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        shape = [*x.shape]
        shape[dimension] = channels
        return x.new_empty(shape, dtype=DTYPE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        return torch.empty_like(x), None, None, *(torch.empty_like(p) for p in parameters)


def _gate(module: FusedGEGLU, x: Tensor) -> Tensor:
    x = module.proj(x)
    return _Kernel.apply(x, x.shape[-1] // 2, -1)


def _norm_and_silu(module: FusedGroupNorm, x: Tensor) -> Tensor:
    return _Kernel.apply(x, x.shape[1], 1, module.weight, module.bias)


def _norm(module: nn.Module, low: bool, copied: bool, x: Tensor) -> Tensor:
    with torch.autocast("meta", enabled=not low):
        x = x.to(DTYPE) if low else x
        return type(module).forward(module, x.clone() if copied else x)
