"""Components for `grad_scaling.py` only: one scale for all blocks, given starting scales, gradients of a wide range."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.sixteen_bit.block_scaling import Scales
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.config import components
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.run import Run

COMPONENTS = {
    "started_scaling": "benchmarks.common.scalings:StartedScaling",
    "global_scaling": "benchmarks.common.scalings:GlobalScaling",
    "wide_gradients": "benchmarks.common.scalings:WideGradients",
}


def register() -> None:
    """Add them to the components of this process."""
    components.COMPONENTS["algorithm"].update(COMPONENTS)


class StartedScaling(ResblockGradScaling):
    """resblock_grad_scaling with a given starting scale per block, such as a long run would reach."""

    def __init__(self, task: Task, *, starts: list[float]) -> None:
        """
        Args:
            starts: binary logarithm of the scale of each block at the start.
        """
        super().__init__(task, start=0.0, least=-100.0, most=100.0)
        self.scales.exponents = torch.tensor(starts, dtype=torch.float64)


class GlobalScaling(ResblockGradScaling):
    """Standard loss scaling by the rule of torch.amp.GradScaler: blocks in fp16, with one scale for all of them.

    The scale is applied where gradients enter a block, not to the loss. Because scales are powers of two, which are
    exact on the 32-bit identity path between blocks, the blocks see the same numbers as with a scaled loss.
    """

    def __init__(self, task: Task, *, start: float = 16.0) -> None:
        """
        Args:
            start: binary logarithm of the scale at the start.
        """
        super().__init__(task, start=start, least=-100.0, most=100.0)
        self.scales = GlobalScales(self.scales.exponents, torch.zeros_like(self.scales.since))


class GlobalScales(Scales):
    """The rule of torch.amp.GradScaler: halve at an overflow, double after 2,000 updates without one."""

    interval = 2000

    def after(self, finite: Tensor) -> Scales:
        """See `Scales.after`."""
        if not finite.all():
            return dataclasses.replace(self, exponents=self.exponents - 1, since=torch.zeros_like(self.since))
        grown = self.since + 1 == self.interval
        return dataclasses.replace(
            self, exponents=self.exponents + grown.double(), since=torch.where(grown, 0, self.since + 1)
        )


class WideGradients(Lever):
    """Spreads the gradients of blocks over a range, as in far larger models. In 32-bit training no bit changes.

    In the backward pass, gradients are multiplied by 2^(-span i / (blocks - 1)) where they enter block i, and divided
    by that factor where they leave it. The gradients of the block's parameters are divided by it before clipping.
    """

    def __init__(self, task: Task, *, span: float) -> None:
        """
        Args:
            span: binary logarithm of the ratio between the factors of the first and the last block.
        """
        self.task = task
        self.span = span

    def change_modules(self, run: Run) -> None:
        blocks = self.task.blocks()
        for number, block in enumerate(blocks):
            block.gradient_factor = 2.0 ** -round(self.span * number / max(1, len(blocks) - 1))
            block.__class__ = type(f"Wide{type(block).__name__}", (_Wide, type(block)), {})

    def average_gradients(self, run: Run) -> None:
        # Scales are taken out before this moment, in `unscale_gradients`, and gradients are clipped after it.
        for block in self.task.blocks():
            for parameter in block.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(block.gradient_factor)


class _Wide(nn.Module):
    gradient_factor: float

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        inside = _Times.apply(x, 1 / self.gradient_factor)
        return x + _Times.apply(self.branch(inside, *context), self.gradient_factor)


class _Times(Function):
    """The identity; multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class WideProducts(TorchDispatchMode):
    """Computes fp16 matrix products on a CPU as a GPU does: summed in 32 bits and rounded once.

    PyTorch's own fp16 products take ten times as long on a CPU without 16-bit arithmetic.
    """

    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.products and args[-1].dtype == torch.float16:
            return func(*(a.float() for a in args), **(kwargs or {})).half()
        return func(*args, **(kwargs or {}))
