"""Learning rate schedules: functions from the clock of a run to the factor of the peak learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from data.aliases import Duration
from data.ranges import check_least
from recipes.training.callback import Callback
from recipes.training.clock import Clock, parse_duration

Schedule = Callable[[Clock], float]
WATCHING = ("state_dict", "step_end", "epoch_end", "eval_end")  # methods of schedules that are callbacks


def constant(*, warmup: Duration = "0ba") -> Schedule:
    """A constant learning rate after a linear warm-up.

    Args:
        warmup: length of the warm-up.
    """
    return lambda clock: _warmed_up(clock, warmup)


def cosine(*, warmup: Duration = "0ba", final: float = 0.0, over: Duration = "1dur") -> Schedule:
    """A linear warm-up, then half a period of a cosine to the end of the run or of `over`, and constant after that.

    Args:
        warmup: length of the warm-up.
        final: learning rate at the end, as a share of the peak.
        over: total length of warm-up and cosine.

    Raises:
        ValueError: a number out of range.
    """
    check_least("schedule", 0, final=final)
    if parse_duration(over)[0] <= 0:
        raise ValueError(f"schedule: over: {over}; give a length above 0")

    def rate(clock: Clock) -> float:
        share = _share_after_warmup(clock, warmup, over)
        if share is None:
            return _warmed_up(clock, warmup)
        return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2

    return rate


def linear(*, warmup: Duration = "0ba", final: float = 0.0) -> Schedule:
    """A linear warm-up, then a straight line to the end of the run.

    Args:
        warmup: length of the warm-up.
        final: learning rate at the end, as a share of the peak.

    Raises:
        ValueError: a number out of range.
    """
    check_least("schedule", 0, final=final)

    def rate(clock: Clock) -> float:
        share = _share_after_warmup(clock, warmup, "1dur")
        return _warmed_up(clock, warmup) if share is None else 1 + share * (final - 1)

    return rate


def checked(schedule: Schedule, name: str) -> Schedule:
    """A schedule whose factors are numbers that a learning rate may have, as Python's: no run could go on from a
    checkpoint with one of NumPy's, and by a negative rate a model would silently unlearn.

    Args:
        schedule: of the recipe.
        name: of the schedule, for messages.

    Raises:
        ValueError: it has methods that a run calls of callbacks alone, and so would not be saved, or not be told.
    """
    watches = [method for method in WATCHING if callable(getattr(schedule, method, None))]
    if watches and not isinstance(schedule, Callback):
        raise ValueError(
            f"schedule: {name} has {watches[0]}, which a run calls of callbacks alone; let its class inherit from "
            "recipes.training.callback.Callback, too"
        )

    def factor(clock: Clock) -> float:
        """
        Raises:
            ValueError: the schedule gives no number, or one that is negative or not finite.
        """
        value = schedule(clock)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(
                f"schedule: {name} gives {value!r} at batch {clock.batch}; give a finite factor of 0 or more"
            )
        return number

    return factor


def _warmed_up(clock: Clock, warmup: str) -> float:
    """The factor in a linear warm-up, from 0 to 1."""
    length, unit = clock.position(warmup)
    passed = clock.passed(unit)
    return 1.0 if passed >= length else passed / length


def _share_after_warmup(clock: Clock, warmup: str, over: str) -> float | None:
    """The share of what follows the warm-up that is done, from 0 to 1; None within the warm-up.

    Raises:
        ValueError: warm-up and total length have different units.
    """
    length, unit = clock.position(over)
    warm, warm_unit = clock.position(warmup)
    if warm and warm_unit != unit:
        raise ValueError(
            f"schedule: a warm-up of {warmup} cannot be taken from {over} of a run of {clock.duration}; give both in "
            "the same unit"
        )
    passed = clock.passed(unit)
    if passed < warm:
        return None
    rest = length - warm  # not above 0 if the run, or `over`, ends within the warm-up
    return min(1.0, (passed - warm) / rest) if rest > 0 else float(passed > length)
