"""When something that happens every so often is due."""

from __future__ import annotations

from collections.abc import Callable

from composer import Event, State, Time, TimeUnit

CHECKPOINT = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT})
STEP_END = frozenset({Event.BATCH_END, Event.EPOCH_END})


def at_intervals(every: str | None, events: frozenset[Event] = STEP_END) -> Callable[[State, Event], bool]:
    """A test that holds at one event whenever `every` has passed, and at one when training ends.

    Composer's own scheduler cannot express shares of a run over data without an end, and holds twice at the end.

    Args:
        every: a duration (500ba, 1ep, 0.25dur); None: only the end.
        events: where it is asked.
    """
    interval = None if every is None else Time.from_input(every, TimeUnit.BATCH)
    if interval is not None and interval.value <= 0:
        raise ValueError(f"an interval must be above 0, got {every}")
    held: tuple[int, Event | None] = (-1, None)  # batch and event at which it last held

    def due(state: State, event: Event) -> bool:
        nonlocal held
        now = state.timestamp.batch.value
        if event not in events:
            return False
        if now == held[0]:
            return event == held[1]  # asked again: Composer shares one test among all evaluators
        if ended(state) or (interval is not None and _crossed(state, interval)):
            held = now, event
            return True
        return False

    return due


def ended(state: State) -> bool:
    """Whether training has come to its end."""
    elapsed = state.get_elapsed_duration()
    return elapsed is not None and elapsed.value >= 1


def _crossed(state: State, interval: Time) -> bool:
    if interval.unit == TimeUnit.DURATION:
        total = state.max_duration
        unit, length = total.unit, interval.value * total.value
    else:
        unit, length = interval.unit, interval.value
    before = 0 if state.previous_timestamp is None else state.previous_timestamp.get(unit).value
    # A share of a run is rarely exact: 0.1 times 30 batches is a little more than 3.
    return int(state.timestamp.get(unit).value / length + 1e-9) > int(before / length + 1e-9)
