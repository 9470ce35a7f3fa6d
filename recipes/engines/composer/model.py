"""The one file that makes a training task a Composer model."""

from __future__ import annotations

from typing import Any, Protocol

from composer import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from recipes.engines.metrics import MeanOf


class Task(Protocol):
    """What a model in `recipes.models` offers a trainer. Tasks are `nn.Module`s and know no trainer.

    Attributes:
        eval_names: the figures of `evaluate` that are averaged over the validation set.
        entry_points: names of further methods that callers use for computing (FSDP prepares their parameters).
    """

    eval_names: list[str]
    entry_points: tuple[str, ...]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scalar losses of a batch; `total` is minimised, the others are logged."""

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """(B,) figures a name; it may return more than those named in `eval_names`, for callbacks."""

    def blocks(self) -> list[nn.Module]:
        """What FSDP gathers one by one, each called through its forward."""

    def recomputed_blocks(self) -> list[nn.Module]:
        """What activation checkpointing computes again one by one; where it is missing, `blocks`."""


class ComposerTask(ComposerModel):
    """Adapts a task: forward gives its losses, validation averages its figures."""

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.task(batch)

    def loss(self, outputs: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        return outputs

    def eval_forward(self, batch: dict[str, Tensor], outputs: Any = None) -> dict[str, Tensor]:
        return self.task.evaluate(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        return {} if is_train else {name: MeanOf(name) for name in self.task.eval_names}

    def update_metric(self, batch: Any, outputs: dict[str, Tensor], metric: MeanOf) -> None:
        metric.update(outputs[metric.figure])
