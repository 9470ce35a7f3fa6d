"""Composer's trainer validates and saves when it is due, and once at the end of a run; see `test_clock.py`."""

from types import SimpleNamespace

import pytest
from composer import Event, Time
from composer.core import Timestamp

from recipes.engines.composer.intervals import CHECKPOINT, STEP_END, at_intervals


def run(every, duration, batches_per_epoch=5, events=STEP_END, samples=4, asked=1):
    """(batch, event) at which a test held in a run as Composer goes through it, asked so many times at each event."""
    due = at_intervals(every, events)
    length = Time.from_timestring(duration)
    state = SimpleNamespace(timestamp=Timestamp(), previous_timestamp=None, max_duration=length)
    state.dataloader_len = batches_per_epoch
    held = []

    def fire(event):
        answers = {due(state, event) for _ in range(asked)}
        assert len(answers) == 1
        if answers.pop():
            held.append((state.timestamp.batch.value, event))

    def step(timestamp, *events):
        state.previous_timestamp, state.timestamp = state.timestamp, timestamp
        for event in events:
            fire(event)

    while state.timestamp.get(length.unit) < length:
        for _ in range(batches_per_epoch):
            step(state.timestamp.to_next_batch(samples=samples), Event.BATCH_END, Event.BATCH_CHECKPOINT)
            if state.timestamp.get(length.unit) >= length:
                break
        if state.timestamp.batch_in_epoch.value == batches_per_epoch:
            step(state.timestamp.to_next_epoch(), Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
    fire(Event.FIT_END)
    return held


def batches(*arguments, **options):
    return [batch for batch, _ in run(*arguments, **options)]


@pytest.mark.parametrize(
    ("every", "duration", "expected"),
    [
        ("3ba", "10ba", [3, 6, 9, 10]),
        (None, "2ep", [10]),
        ("1ep", "12ba", [5, 10, 12]),
        ("0.25dur", "12ba", [3, 6, 9, 12]),
        ("0.5dur", "2ep", [5, 10]),
        ("10sp", "10ba", [3, 5, 8, 10]),
    ],
)
def test_intervals(every, duration, expected):
    assert batches(every, duration) == expected
    assert batches(every, duration, asked=2) == expected  # one test is shared by all evaluators
    checkpoints = run(every, duration, events=CHECKPOINT)
    assert [batch for batch, _ in checkpoints] == expected and {event for _, event in checkpoints} <= CHECKPOINT


def test_an_epoch_ends_at_its_own_event():
    assert run("1ep", "2ep") == [(5, Event.EPOCH_END), (10, Event.EPOCH_END)]
    assert run("5ba", "2ep") == [(5, Event.BATCH_END), (10, Event.BATCH_END)]
    # The last checkpoint of a run of epochs is of a run that has ended.
    saved = run("5ba", "2ep", events=CHECKPOINT)
    assert saved == [(5, Event.BATCH_CHECKPOINT), (10, Event.EPOCH_CHECKPOINT)]
