"""The learning rate in the course of a run."""

from __future__ import annotations

from recipes.training.callback import Callback
from recipes.training.run import Run


class LRMonitor(Callback):
    """Logs the learning rate of each parameter group, as `lr-AdamW/group0`, after each batch."""

    def __init__(self) -> None:
        pass

    def step_end(self, run: Run) -> None:
        name = type(run.optimizer).__name__
        run.log({f"lr-{name}/group{i}": group["lr"] for i, group in enumerate(run.optimizer.param_groups)})
