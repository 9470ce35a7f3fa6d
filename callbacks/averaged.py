"""The averaged weights of a run, if it has any."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA


def averaged(average: ScheduledEMA | None) -> AbstractContextManager[bool]:
    """A context in which the model has its averaged weights if there are any; it yields whether there are.

    Args:
        average: the run's; None: the run averages nothing.
    """
    return nullcontext(False) if average is None else average.applied()
