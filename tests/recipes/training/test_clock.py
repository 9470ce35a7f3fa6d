"""Durations, clocks and intervals: things happen when they are due, and once at the end of a run."""

from dataclasses import replace

import pytest

from recipes.training.clock import CheckpointInterval, Clock, Interval, parse_duration


def moments(duration, batches_per_epoch=5, samples=4):
    """(name, clock) of each end of a step and of an epoch in a run."""
    clock = Clock(0, 0, 0, duration, batches_per_epoch)
    while not clock.ended:
        before = (clock.batch, clock.sample, clock.epoch)
        began = batches_per_epoch * clock.epoch
        clock = replace(clock, batch=clock.batch + 1, sample=clock.sample + samples, epoch_began=began, before=before)
        yield "step", clock
        if clock.batch % batches_per_epoch == 0:
            before = (clock.batch, clock.sample, clock.epoch)
            clock = replace(clock, epoch=clock.epoch + 1, epoch_began=clock.batch, before=before)
            yield "epoch", clock


def held(every, duration, start=0, kind=Interval):
    """(name, batch) of the moments at which an interval is due, from a batch on."""
    due = kind(every)
    return [(name, clock.batch) for name, clock in moments(duration) if clock.batch > start and due(clock)]


def test_the_moment_before_the_last_batch():
    told = [Clock(0, 0, 0, "3ep", 5, 0), *(clock for _, clock in moments("3ep"))]
    for before, now in zip(told, told[1:], strict=False):
        if now.batch == before.batch:  # the end of an epoch
            continue
        found = now.before_last_batch(4)
        assert (found.batch, found.sample) == (before.batch, before.sample)
    for before, _, now in zip(told[4::6], told[5::6], told[6::6], strict=True):
        found = now.before_last_batch(4)
        assert replace(found, before=before.before) == before


@pytest.mark.parametrize(
    ("every", "duration", "expected"),
    [
        ("3ba", "12ba", [3, 6, 9, 12]),
        ("3ba", "10ba", [3, 6, 9, 10]),
        ("5ba", "10ba", [5, 10]),
        ("1ba", "3ba", [1, 2, 3]),
        ("20ba", "10ba", [10]),
        (None, "10ba", [10]),
        (None, "2ep", [10]),
        (None, "40sp", [10]),
        ("1ep", "3ep", [5, 10, 15]),
        ("1ep", "12ba", [5, 10, 12]),
        ("3ba", "2ep", [3, 6, 9, 10]),
        ("0.25dur", "12ba", [3, 6, 9, 12]),
        ("0.1dur", "30ba", list(range(3, 31, 3))),
        ("0.07dur", "100ba", [*range(7, 100, 7), 100]),  # 7.000000000000001 batches
        ("0.5dur", "2ep", [5, 10]),
        ("0.25dur", "1ep", [2, 3, 4, 5]),
        ("0.3dur", "3ep", [5, 9, 14, 15]),
        ("0.1dur", "30ep", list(range(15, 151, 15))),
        ("0.3dur", "10ba", [3, 6, 9, 10]),
        ("10sp", "10ba", [3, 5, 8, 10]),
    ],
)
def test_intervals(every, duration, expected):
    assert [batch for _, batch in held(every, duration)] == expected


def test_a_resumed_run_keeps_the_interval():
    assert held("4ba", "12ba", start=6) == [("step", 8), ("step", 12)]


def test_an_epoch_ends_at_its_own_moment():
    assert held("1ep", "2ep") == [("epoch", 5), ("epoch", 10)]
    assert held("5ba", "2ep") == [("step", 5), ("step", 10)]
    assert held("0.1dur", "30ep")[:2] == [("epoch", 15), ("epoch", 30)]
    assert held("0.07dur", "100ep")[:2] == [("epoch", 35), ("epoch", 70)]


@pytest.mark.parametrize("every", ["5ba", "1ep", "10ba", "0.5dur", None])
def test_the_last_checkpoint_of_a_run_of_epochs_is_of_a_run_that_has_ended(every):
    saved = held(every, "2ep", kind=CheckpointInterval)
    assert saved[-1] == ("epoch", 10) and [batch for _, batch in saved] == [batch for _, batch in held(every, "2ep")]
    assert held("5ba", "2ep", kind=CheckpointInterval)[0] == ("step", 5)
    assert held("5ba", "10ba", kind=CheckpointInterval) == [("step", 5), ("step", 10)]


def test_where_it_is_not_known_how_long_an_epoch_is_or_when_it_began_its_end_is_not_seen():
    known = Clock(10, 40, 1, "2ep", epoch_batches=5, epoch_began=5)
    assert known.ends_with_epoch
    assert not replace(known, epoch_batches=None).ends_with_epoch
    assert not replace(known, epoch_began=None).ends_with_epoch


def test_where_the_length_of_an_epoch_is_not_known_a_share_of_a_run_ends_with_an_epoch():
    due = Interval("0.25dur")
    clocks = [(clock.batch, replace(clock, epoch_batches=None)) for _, clock in moments("3ep")]
    assert [batch for batch, clock in clocks if due(clock)] == [5, 10, 15]


@pytest.mark.parametrize("every", ["0ba", "0dur"])
def test_an_interval_is_above_zero(every):
    with pytest.raises(ValueError, match=f"every: `{every}`; give an interval above 0"):
        Interval(every)


@pytest.mark.parametrize("text", ["500", "ba", "-1ba", "5 ba", "5batches", "1e3ba", ""])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration; write a number and a unit, such as 500ba"):
        parse_duration(text)


def test_durations():
    assert [parse_duration(text) for text in ("500ba", "2.5ep", ".5dur", "7sp")] == [
        (500.0, "ba"), (2.5, "ep"), (0.5, "dur"), (7.0, "sp"),
    ]  # fmt: skip


def test_a_clock_measures_in_batches_where_it_can():
    known, unknown = Clock(3, 24, 0, "4ep", 10), Clock(3, 24, 0, "4ep", None)
    assert known.measure("2ep") == (20, "ba") and unknown.measure("2ep") == (2, "ep")
    assert known.measure("0.25dur") == (10, "ba") and unknown.measure("0.25dur") == (1, "ep")
    assert known.measure("5ba") == (5, "ba") and known.measure("48sp") == (48, "sp")
    assert Clock(3, 24, 0, "100sp", 10).measure("0.5dur") == (50, "sp")


@pytest.mark.parametrize(("duration", "share"), [("12ba", 0.25), ("2ba", 1.0), ("96sp", 0.25), ("2ep", 0.5)])
def test_the_share_that_is_done(duration, share):
    clock = Clock(3, 24, 1, duration)
    assert clock.share == share and clock.ended == (share == 1)


def test_a_run_of_epochs_gets_on_within_an_epoch():
    assert [Clock(batch, 8 * batch, batch // 4, "3ep", 4).share for batch in (0, 3, 4, 12)] == [0, 0.25, 1 / 3, 1]
    assert Clock(3, 24, 0, "3ep").share == 0  # how long an epoch is is not known


def test_epochs_that_had_another_number_of_batches():
    """Two epochs of 10 batches, then two of 5: the run ends at batch 30."""
    earlier, later = Clock(13, 52, 1, "4ep", 10, 10), Clock(23, 104, 2, "4ep", 5, 20)
    assert earlier.position("4ep") == (40, "ba") and earlier.share == 13 / 40
    assert later.position("1dur") == (30, "ba") and later.share == 23 / 30
    assert [later.position(text)[0] for text in ("0ep", "1ep", "2ep", "2.4ep", "3ep")] == [0, 10, 20, 22, 25]
    assert Clock(3, 12, 0, "4ep", 10, 0).position("0ep") == (0, "ba")
    assert later.measure("1ep") == (5, "ba")  # a length, from now on
    assert later.position("7ba") == (7, "ba") and replace(later, epoch_batches=None).position("1ep") == (1, "ep")


def test_a_position_is_a_length_where_epochs_stay_the_same():
    for text in ("3ep", "0.5dur", "1.25ep", "6ba"):
        clocks = [Clock(batch, 8 * batch, batch // 4, "5ep", 4, batch - batch % 4) for batch in range(20)]
        assert {clock.position(text) for clock in clocks} == {clocks[0].measure(text)}
