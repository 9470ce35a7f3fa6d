"""A number of the model that changes in the course of a run, such as a loss weight or a temperature."""

from __future__ import annotations

import math
from typing import Literal

from composer import Callback, Logger, State
from torch import nn

from data.aliases import Duration  # noqa: F401 - read from the annotations below
from recipes.algorithms.averaging.scheduled_ema import measure

Shape = Literal["cosine", "linear"]


class ScheduledValue(Callback):
    """Sets a value of the model before each batch, as a function of the batch's number alone, and logs it.

    A resumed run therefore goes on exactly where it stopped.
    """

    def __init__(
        self,
        task: nn.Module,
        *,
        value: str,
        start: float,
        end: float,
        over: Duration = "1dur",
        shape: Literal["cosine", "linear"] = "cosine",
    ) -> None:
        """
        Args:
            value: which value of the model, such as beta or temperature of a dvae.
            start: at the first batch.
            end: from the end of `over` on.
            over: length of the change, from the start of the run.
            shape: half a cosine, flat at both ends, or a straight line.

        Raises:
            ValueError: the model has no such value.
        """
        if value not in task.scheduled:
            names = ", ".join(task.scheduled) or "none"
            raise ValueError(f"scheduled_value: the model has no value `{value}` to be scheduled; it has: {names}")
        self.task = task
        self.value = value
        self.start, self.end = start, end
        self.over = over
        self.shape: Shape = shape

    def fit_start(self, state: State, logger: Logger) -> None:
        self._set(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        logger.log_metrics({f"schedule/{self.value}": self._set(state)})

    def _set(self, state: State) -> float:
        length, unit = measure(self.over, state)
        passed = state.timestamp.get(unit).value
        number = between(self.start, self.end, passed / length if length else 1.0, self.shape)
        getattr(self.task, self.value).fill_(number)
        return number


def between(start: float, end: float, share: float, shape: Shape) -> float:
    """The value after a share of the way from `start` to `end`; a share above 1 is the whole way."""
    share = min(1.0, share)
    weight = share if shape == "linear" else (1 - math.cos(math.pi * share)) / 2
    return (1 - weight) * start + weight * end
