"""Norms in 32 bits under autocast, as on a GPU; a CPU's autocast leaves them in the format of their input."""

from __future__ import annotations

from torch import Tensor, nn

from recipes.config.components import COMPONENTS
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.run import Run


class GroupNorm32(nn.GroupNorm):
    """A GroupNorm in 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class LayerNorm32(nn.LayerNorm):
    """A LayerNorm in 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def widen_norms(model: nn.Module) -> None:
    """Let all norms of a model compute in 32 bits."""
    for module in model.modules():
        module.__class__ = {nn.GroupNorm: GroupNorm32, nn.LayerNorm: LayerNorm32}.get(type(module), type(module))


class WideNorms(Lever):
    """See `widen_norms`."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def change_modules(self, run: Run) -> None:
        widen_norms(self.task)


def register() -> None:
    """Add the lever to the components of this process."""
    COMPONENTS["algorithm"]["wide_norms"] = "benchmarks.common.wide_norms:WideNorms"
