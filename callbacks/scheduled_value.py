"""A value of the model that changes in the course of a run, such as a loss weight or a temperature."""

from __future__ import annotations

import math
from typing import Literal

from data.aliases import Duration
from recipes.models.task import Task
from recipes.training.callback import Callback
from recipes.training.clock import Clock
from recipes.training.run import Run

Shape = Literal["cosine", "linear"]


class ScheduledValue(Callback):
    """Sets a value of the model before each batch and logs it.

    The value depends only on how much of the run is done, so a resumed run goes on exactly where it stopped.
    """

    def __init__(
        self,
        task: Task,
        *,
        value: str,
        start: float,
        end: float,
        over: Duration = "1dur",
        shape: Literal["cosine", "linear"] = "cosine",
    ) -> None:
        """
        Args:
            value: name of the value, such as beta or temperature of a dvae.
            start: the value at the first batch.
            end: the value from the end of `over` on.
            over: length of the change, from the start of the run.
            shape: half a cosine, flat at both ends, or a straight line.

        Raises:
            ValueError: the model has no such value, or cannot train with its start or end.
        """
        if value not in task.scheduled:
            names = ", ".join(task.scheduled) or "none"
            raise ValueError(f"scheduled_value: the model has no value `{value}` to be scheduled; it has: {names}")
        for key, number in (("start", start), ("end", end)):
            try:
                task.check_scheduled(value, number)
            except ValueError as error:
                raise ValueError(f"scheduled_value: {key}: {error}") from None
        self.task = task
        self.value = value
        self.values = (start, end)  # `end` is a moment of a run
        self.over = over
        self.shape: Shape = shape

    def begin(self, run: Run) -> None:
        self._set(run.clock)

    def batch_start(self, run: Run) -> None:
        run.log({f"schedule/{self.value}": self._set(run.clock)})

    def _set(self, clock: Clock) -> float:
        length, unit = clock.position(self.over)
        passed = clock.passed(unit)
        # It is below 0 where the change ended in batches of an epoch that had more samples than those of now.
        number = between(*self.values, passed / length if length > 0 else 1.0, self.shape)
        getattr(self.task, self.value).fill_(number)
        return number


def between(start: float, end: float, share: float, shape: Shape) -> float:
    """The value when a share of the change from `start` to `end` is done; a share above 1 counts as 1."""
    share = min(1.0, share)
    weight = share if shape == "linear" else (1 - math.cos(math.pi * share)) / 2
    return (1 - weight) * start + weight * end
