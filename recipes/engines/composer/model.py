"""The one file that makes a training task a Composer model."""

from __future__ import annotations

from typing import Any

from composer import ComposerModel
from torch import Tensor
from torchmetrics import Metric

from recipes.engines.metrics import MeanOf
from recipes.models.task import Task


class ComposerTask(ComposerModel):
    """Adapts a task: forward gives its losses, validation averages its figures."""

    def __init__(self, task: Task) -> None:
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
