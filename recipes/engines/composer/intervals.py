"""When Composer's trainer evaluates and saves checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from composer import Event, State

from recipes.engines.composer.run import clock_of
from recipes.training.clock import CheckpointInterval, Interval

CHECKPOINT = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT})
STEP_END = frozenset({Event.BATCH_END, Event.EPOCH_END})


def at_intervals(every: str | None, events: frozenset[Event] = STEP_END) -> Callable[[State, Event], bool]:
    """A test that holds at one event whenever `every` has passed, and at one event at the end of training.

    Composer's own scheduler cannot express shares of a run over data without an end, and holds twice at the end.

    Args:
        every: a duration (500ba, 1ep, 0.25dur); None: only the end.
        events: at which Composer asks.

    Raises:
        ValueError: not a duration, or not above 0.
    """
    interval = CheckpointInterval(every) if events == CHECKPOINT else Interval(every)
    held: tuple[int, Event | None] = (-1, None)  # batch and event at which it last held

    def due(state: State, event: Event) -> bool:
        nonlocal held
        if event not in events:
            return False
        clock = clock_of(state)
        if (clock.batch, event) == held:
            return True  # asked again: Composer shares one test among all evaluators
        if not interval(clock):
            return False
        held = clock.batch, event
        return True

    return due
