"""A gradient scale for each residual block, in 16-bit blocks on a 32-bit identity path (Ramesh et al. 2021, 2.4 and D).

One scale for the whole model must keep the largest gradients of all layers below fp16's 65,504, and the smallest
underflow. Here a block's backward pass begins by multiplying with its own scale, and ends by dividing by it.

The published loss is divided by the number of replicas M too, and scales lie around M 2^13; here each replica's loss is
its own mean, M times as large, so the same numbers reach the 16-bit arithmetic with scales around 2^13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Enter(Function):
    """Identity path to block: 32 to 16 bits. Backward: to 32 bits, filtered, divided by the scale.

    The filter sets what is not finite to zero and counts it: without it, one overflow here would reach, and lower the
    scales of, all earlier blocks.
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
    """Block to identity path: 16 to 32 bits. Backward: multiplied by the scale in 32 bits, then to 16."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
        """y (...) float16, scale () float32 -> (...) float32."""
        ctx.save_for_backward(scale)
        ctx.dtype = y.dtype
        return y.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return (gradient * scale).to(ctx.dtype), None


class ScaledBranch(nn.Module):
    """What `scale_branch` puts before a branch's class.

    Attributes:
        gradient_scale: () float32, the block's; constant between two updates.
        gradients_filtered: () int64, gradients that were not finite where they left the block, since it was set to 0.
    """

    gradient_scale: Tensor
    gradients_filtered: Tensor

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(...) float32 -> (...) float32, computed in 16 bits.

        Raises:
            ValueError: the identity path is not in 32-bit.
        """
        if x.dtype != torch.float32:
            raise ValueError(
                f"resblock_grad_scaling: the identity path is {x.dtype}; it must be 32-bit (FSDP: parameters in fp32)"
            )
        with torch.autocast(x.device.type, dtype=torch.float16):
            y = super().forward(Enter.apply(x, self.gradient_scale, self.gradients_filtered), *context)
        return Leave.apply(y, self.gradient_scale)


def scale_branch(branch: nn.Module, scale: Tensor, filtered: Tensor) -> None:
    """Make the branch of a residual block, x + branch(x), one with a gradient scale, in place; names stay.

    Gradients of its parameters carry the scale until `unscale`.

    Args:
        branch: its forward takes the identity path's tensor first, and returns what is added to it.
        scale: () float32, read at each pass.
        filtered: () int64.
    """
    assert not isinstance(branch, ScaledBranch)
    assert "forward" not in vars(branch), "a forward of the object's own would hide the class's"
    branch.__class__ = type(f"Scaled{type(branch).__name__}", (ScaledBranch, type(branch)), {})
    # No buffers: they are in no checkpoint of the model.
    branch.gradient_scale, branch.gradients_filtered = scale, filtered


@torch.no_grad()
def unscale(gradients: list[Tensor], scale: Tensor) -> Tensor:
    """Divide a block's gradients by its scale, in place.

    Args:
        gradients: float32, of one device.
        scale: () float32.

    Returns:
        bool scalar: whether all are finite.
    """
    gradients = [g for g in gradients if g.numel()]
    if not gradients:
        return torch.ones((), dtype=torch.bool, device=scale.device)
    torch._foreach_div_(gradients, scale)
    return torch.isfinite(torch.stack(torch._foreach_norm(gradients, math.inf))).all()


@dataclass
class Scales:
    """The scales' rule, as a state and its transition.

    Attributes:
        exponents: (blocks,) float64, binary logarithms of the scales.
        since: (blocks,) int64, updates since a scale was last divided; the window itself before it ever was.
    """

    exponents: Tensor
    since: Tensor
    growth: float = 1 / 1000
    cut: float = 0.5
    window: int = 125
    least: float = 7.0
    most: float = 24.0

    @classmethod
    def new(cls, blocks: int, start: float = 13.0) -> Scales:
        """All at 2^start, and free to be divided at once."""
        return cls(
            torch.full((blocks,), start, dtype=torch.float64),
            torch.full((blocks,), cls.window, dtype=torch.int64),
        )

    def values(self) -> Tensor:
        """(blocks,) float32."""
        return torch.exp2(self.exponents).float()

    def after(self, finite: Tensor) -> Scales:
        """The scales after an update; one that is skipped is an update.

        A block whose gradients were finite has its scale multiplied by 2^(1/1000), whatever became of the others.
        Else it is divided by sqrt(2), unless that was done less than 125 updates ago: the overflows that follow at once
        are of one cause.

        Args:
            finite: (blocks,) bool.
        """
        divided = ~finite & (self.since >= self.window)
        exponents = self.exponents + self.growth * finite.double() - self.cut * divided.double()
        return Scales(
            exponents.clamp(self.least, self.most),
            torch.where(divided, 1, (self.since + 1).clamp(max=self.window)),
            self.growth,
            self.cut,
            self.window,
            self.least,
            self.most,
        )
