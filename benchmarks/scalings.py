"""Components of `grad_scaling.py` alone: one scale for all blocks, scales that start apart, gradients of wide range."""

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
from recipes.training.lever import Lever
from recipes.training.run import Run

COMPONENTS = {
    "started_scaling": "benchmarks.scalings:StartedScaling",
    "global_scaling": "benchmarks.scalings:GlobalScaling",
    "wide_gradients": "benchmarks.scalings:WideGradients",
}


def register() -> None:
    """Make them known to recipes of this process."""
    components.COMPONENTS["algorithm"].update(COMPONENTS)


class StartedScaling(ResblockGradScaling):
    """resblock_grad_scaling whose scales begin apart, where a long run would have brought them."""

    def __init__(self, task: nn.Module, *, starts: list[float]) -> None:
        """
        Args:
            starts: binary logarithm of each block's scale at the start.
        """
        super().__init__(task, start=0.0, least=-100.0, most=100.0)
        self.scales.exponents = torch.tensor(starts, dtype=torch.float64)


class GlobalScaling(ResblockGradScaling):
    """Standard loss scaling, by the rule of torch.amp.GradScaler: the blocks in fp16, one scale for all.

    The scale is applied where a block is entered, and not to the loss. Powers of two change no bit in the 32-bit
    identity path between, so the blocks see the same numbers.
    """

    def __init__(self, task: nn.Module, *, start: float = 16.0) -> None:
        """
        Args:
            start: binary logarithm of the scale at the start.
        """
        super().__init__(task, start=start, least=-100.0, most=100.0)
        self.scales = GlobalScales(self.scales.exponents, torch.zeros_like(self.scales.since))


class GlobalScales(Scales):
    """The rule of torch.amp.GradScaler: halved at an overflow, doubled after 2,000 updates without one."""

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
    """Spreads the gradients of blocks over a range, as far larger models have it; in 32 bits it changes no bit.

    Block i's gradients are multiplied by 2^(-span i / (blocks - 1)) where they enter it on the way back, and divided by
    that where they leave it. So are those of its parameters, before they are clipped and used.
    """

    def __init__(self, task: nn.Module, *, span: float) -> None:
        """
        Args:
            span: binary logarithm of what lies between the first block and the last.
        """
        self.task = task
        self.span = span

    def change_modules(self, run: Run) -> None:
        self._widen(self.task.blocks())

    def average_gradients(self, run: Run) -> None:
        """Divide the factor out, after scales were and before clipping."""
        for block in self.task.blocks():
            for parameter in block.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(block.gradient_factor)

    def _widen(self, blocks: list[nn.Module]) -> None:
        for number, block in enumerate(blocks):
            block.gradient_factor = 2.0 ** -round(self.span * number / max(1, len(blocks) - 1))
            block.__class__ = type(f"Wide{type(block).__name__}", (_Wide, type(block)), {})


class _Wide(nn.Module):
    gradient_factor: float

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        inside = _Times.apply(x, 1 / self.gradient_factor)
        return x + _Times.apply(self.branch(inside, *context), self.gradient_factor)


class _Times(Function):
    """Nothing forward; gradients times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class WideProducts(TorchDispatchMode):
    """Matrix products of 16-bit floats on a CPU as a GPU makes them, summed in 32 bits and rounded once.

    A CPU without 16-bit arithmetic needs ten times as long for its own.
    """

    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.products and args[-1].dtype == torch.float16:
            return func(*(a.float() for a in args), **(kwargs or {})).half()
        return func(*args, **(kwargs or {}))
