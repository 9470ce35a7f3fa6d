"""One gradient scale per residual block: 16-bit blocks on a 32-bit identity path (Ramesh et al. 2021, 2.4 and D).

A single scale for the whole model must keep the largest gradients of all layers below fp16's maximum of 65,504, which
makes the smallest ones underflow. Here, the backward pass of each block multiplies gradients by the scale of the block
where they enter it, and divides them by it where they leave it.

The published loss is also divided by the number of replicas M, and scales are around M 2^13. Here the loss of each
replica is its own mean, which is M times as large, so that scales around 2^13 give the same 16-bit numbers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from recipes.algorithms.modules.activation_checkpointing import recomputed_modules
from recipes.training.compiled import result


class Enter(Function):
    """Casts what enters a block from 32 to 16 bits. Backward: casts to 32 bits, filters, and divides by the scale.

    The filter replaces values that are not finite by zero and counts them. Without it, an overflow in one block would
    reach all earlier blocks and lower their scales, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, filtered: Tensor) -> Tensor:
        """x (...) float32, scale () float32, filtered () int64, which backward adds to -> (...) float16."""
        ctx.save_for_backward(scale)
        ctx.filtered = filtered
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        finite = torch.isfinite(gradient)
        ctx.filtered.add_(finite.logical_not().sum())
        return torch.where(finite, gradient.to(torch.float32), 0.0) / scale, None, None


class Leave(Function):
    """Casts what leaves a block from 16 to 32 bits. Backward: multiplies by the scale in 32 bits, and casts to 16."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
        """y (...) float16, scale () float32 -> (...) float32."""
        # Not by `save_for_backward`: recomputation would go on to here, and a divided branch send its result again.
        ctx.scale, ctx.dtype = scale, y.dtype
        return result(y.to(torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * ctx.scale).to(ctx.dtype), None


class ScaledBranch(nn.Module):
    """The class that `scale_branch` adds as first base class of a branch.

    Attributes:
        gradient_scale: () float32, the scale of the block; constant between two updates.
        gradients_filtered: () int64, the number of gradients that were not finite where they left the block, since it
            was last set to 0.
    """

    gradient_scale: Tensor
    gradients_filtered: Tensor

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """x (...) float32 -> (...) float32, computed in 16 bits.

        Raises:
            ValueError: x is not float32.
        """
        if x.dtype != torch.float32:
            raise ValueError(
                f"resblock_grad_scaling: the identity path is {x.dtype}; it must be 32-bit (FSDP: parameters in fp32)"
            )
        with torch.autocast(x.device.type, dtype=torch.float16):
            y = super().forward(Enter.apply(x, self.gradient_scale, self.gradients_filtered), *context)
        return Leave.apply(y, self.gradient_scale)


def scale_branch(branch: nn.Module, scale: Tensor, filtered: Tensor) -> None:
    """Add a gradient scale to the branch of a residual block, x + branch(x), in place. Parameter names do not change.

    The gradients of its parameters are multiplied by the scale until `unscale` divides them.

    Args:
        branch: its forward takes the tensor of the identity path first, and returns what is added to it.
        scale: () float32, read in each pass.
        filtered: () int64, to which the backward pass adds.
    """
    assert not isinstance(branch, ScaledBranch)
    # Recomputation calls the forward of the class; any other instance attribute would hide it.
    assert "forward" not in vars(branch) or branch in recomputed_modules(branch), "its forward is not the class's"
    branch.__class__ = _scaled(type(branch))
    # Not buffers, so that checkpoints of the model do not contain them. Compiled code saves the count for the backward
    # pass; `data` has a version counter of its own, so that counts of other branches in the same memory may change.
    branch.gradient_scale, branch.gradients_filtered = scale, filtered.data


@functools.cache  # one class for all branches of a kind, as compiled code is shared by modules of a class
def _scaled(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Scaled{kind.__name__}", (ScaledBranch, kind), {})


@torch.no_grad()
def unscale(gradients: list[Tensor], scale: Tensor) -> Tensor:
    """Divide a block's 32-bit gradients by its scale, in place. Those that are stored in 16 bits keep it.

    Args:
        gradients: float32 or float16, on one device.
        scale: () float32.

    Returns:
        () bool: whether all are finite.
    """
    gradients = [g for g in gradients if g.numel()]
    if not gradients:
        return torch.ones((), dtype=torch.bool, device=scale.device)
    wide = [g for g in gradients if g.dtype == torch.float32]
    if wide:
        torch._foreach_div_(wide, scale)
    largest = [norm.float() for norm in torch._foreach_norm(gradients, math.inf)]
    return torch.isfinite(torch.stack(largest)).all()


@dataclass
class Scales:
    """The published rule of the scales: a state and its transition (Ramesh et al. 2021, appendix D).

    Attributes:
        exponents: (blocks,) float64, binary logarithms of the scales.
        since: (blocks,) int64, updates since each scale was last divided, at most `window`.
        window: number of updates after a division in which a scale is not divided again.
        least: lower bound of the exponents.
        most: upper bound of the exponents.
    """

    exponents: Tensor
    since: Tensor
    window: int = 125
    least: float = 7.0
    most: float = 24.0

    @classmethod
    def new(cls, blocks: int, start: float = 13.0) -> Scales:
        """Scales of 2^start for all blocks, which the first overflow may already divide."""
        return cls(
            torch.full((blocks,), start, dtype=torch.float64),
            torch.full((blocks,), cls.window, dtype=torch.int64),
        )

    def values(self) -> Tensor:
        """The scales, (blocks,) float32."""
        return torch.exp2(self.exponents).float()

    def after(self, finite: Tensor) -> Scales:
        """The scales after an update, which may have been skipped.

        The scale of a block whose gradients were finite is multiplied by 2^(1/1000), also if other blocks overflowed.
        Otherwise it is divided by sqrt(2), unless it was divided less than 125 updates ago, because overflows in quick
        succession have the same cause.

        Args:
            finite: (blocks,) bool, whether the gradients of each block were finite.
        """
        divided = ~finite & (self.since >= self.window)
        exponents = self.exponents + finite.double() / 1000 - 0.5 * divided.double()
        since = torch.where(divided, 1, (self.since + 1).clamp(max=self.window))
        return replace(self, exponents=exponents.clamp(self.least, self.most), since=since)
