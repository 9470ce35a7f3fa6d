"""The one file that makes a training task a Composer model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from composer import ComposerModel
from torch import Tensor
from torchmetrics import Metric

from data.loading import WEIGHT
from recipes.engines.metrics import Figure, figures_of
from recipes.models.task import Task, losses_of


class ComposerTask(ComposerModel):
    """Adapts a task: forward gives its losses, validation averages its figures."""

    def __init__(self, task: Task, autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """
        Args:
            task: the model.
            autocast: the context in which the task is called. Composer enters one of its own, but on GPUs alone.
        """
        super().__init__()
        self.task = task
        self.autocast = autocast

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.autocast():
            return self.task(batch)

    def loss(self, outputs: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        return losses_of(self.task, outputs)

    def eval_forward(self, batch: dict[str, Tensor], outputs: Any = None) -> dict[str, Tensor]:
        with self.autocast():
            return self.task.evaluate(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        return {} if is_train else figures_of(self.task)

    def update_metric(self, batch: Any, outputs: dict[str, Tensor], metric: Figure) -> None:
        metric.update(outputs, batch.get(WEIGHT))
