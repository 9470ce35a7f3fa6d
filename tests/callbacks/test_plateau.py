"""Halving on plateaus: the rule alone, and the rate of a run that is interrupted and goes on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callbacks.plateau import Plateau, PlateauRule
from recipes.training.callback import Callback
from tests.callbacks.stand_ins import Squares
from tests.recipes.training.fake_run import FakeRun, train

rules = st.builds(
    PlateauRule, window=st.integers(1, 4), patience=st.integers(1, 3), threshold=st.floats(0, 0.1),
    limit=st.integers(0, 4),
)  # fmt: skip
losses = st.lists(st.floats(0.01, 10), max_size=80)


@given(rules, losses)
def test_plateaus_are_windows_without_a_lower_mean(rule, values):
    """The rule's own words, over whole windows at a time."""
    expected, best, waited = [], math.inf, 0
    for end in range(rule.window, len(values) + 1, rule.window):
        mean = sum(values[end - rule.window : end]) / rule.window
        if math.isinf(best) or mean < best * (1 - rule.threshold) - 1e-12:
            best, waited = mean, 0
            continue
        if abs(mean - best * (1 - rule.threshold)) < 1e-9:
            return  # as near as rounding: either is right
        waited += 1
        if waited == rule.patience and len(expected) < rule.limit:
            expected.append(end - 1)
            waited = 0
    assert [i for i, value in enumerate(values) if rule.add(value)] == expected
    assert rule.plateaus == len(expected) <= rule.limit


@given(rules, losses, st.integers(0, 80))
def test_a_rule_goes_on_where_it_stopped(rule, values, stop):
    saved = Plateau(window=rule.window, patience=rule.patience, threshold=rule.threshold, limit=rule.limit)
    whole = [rule.add(value) for value in values]
    begun = [saved.rule.add(value) for value in values[:stop]]
    resumed = Plateau(window=rule.window, patience=rule.patience, threshold=rule.threshold, limit=rule.limit)
    resumed.load_state_dict(saved.state_dict())
    assert begun + [resumed.rule.add(value) for value in values[stop:]] == whole
    assert resumed.state_dict() == {key: getattr(rule, key) for key in resumed.state_dict()}


def test_a_falling_loss_is_no_plateau_and_bad_batches_do_not_count():
    rule = PlateauRule(window=2, patience=2, threshold=0.001, limit=5)
    assert not any(rule.add(10 * 0.99**i) for i in range(200))
    flat = PlateauRule(window=2, patience=2, threshold=0.001, limit=5)
    values = [1.0, math.nan, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]
    assert [flat.add(value) for value in values] == [False] * 7 + [True]


@pytest.mark.parametrize("best", [0.1, 1.0, 10.0, -10.0])
def test_the_threshold_is_a_share_of_the_lowest_mean(best):
    for fall, lower in ((0.015, False), (0.025, True)):
        rule = PlateauRule(window=1, patience=1, threshold=0.02, limit=1)
        assert [rule.add(best), rule.add(best - fall * abs(best))] == [False, not lower]


@pytest.mark.parametrize("wrong", [{"window": 0}, {"patience": 0}, {"factor": 1.0}, {"threshold": -0.1}, {"limit": -1}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(ValueError, match="plateau: "):
        Plateau(**wrong)


class Rates(Callback):
    """Sets the rate of each batch as an engine does, and keeps it."""

    def __init__(self, schedule):
        self.schedule, self.values = schedule, []

    def batch_start(self, run):
        self.values.append(self.schedule(run.clock))
        run.optimizer.param_groups[0]["lr"] = 0.1 * self.values[-1]


def test_the_rate_of_a_run(capsys):
    """A loss that hardly falls: rates are halved to the limit, and a resumed run has the rates of the whole one."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(4, 2)} for _ in range(5)]
    start = Squares(1).state_dict()

    def run(duration, start, schedule_state=None, batch=0):
        """(rates, weights, the schedule's state) of a run from a batch on."""
        fake = FakeRun(Squares(1), duration=f"{duration}ba")
        fake.task.load_state_dict(start)
        if batch:
            fake.at(batch, samples=4)
        schedule = Plateau(warmup="3ba", window=2, patience=1, threshold=0.99, limit=2)
        if schedule_state is not None:
            schedule.load_state_dict(schedule_state)
        rates = Rates(schedule)
        train(fake, data, [rates, schedule])
        assert list(fake.values("schedule/plateaus")) == list(range(max(3, batch + 1), duration + 1))
        return rates.values, fake.task.state_dict(), schedule.state_dict()

    whole, weights, _ = run(12, start)
    assert whole[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    # The means of batches 3 and 4, 5 and 6, 7 and 8: the first, and two that are not a hundredth of it.
    assert whole[4:] == pytest.approx([1] * 2 + [1 / 2] * 2 + [1 / 4] * 4)
    lines = ["plateau: number 1 at batch 6, rate x 0.5", "plateau: number 2 at batch 8, rate x 0.25"]
    assert capsys.readouterr().out.splitlines() == lines
    part, part_weights, state = run(7, start)
    rest, rest_weights, _ = run(12, part_weights, state, batch=7)
    assert part + rest == whole
    assert all(torch.equal(rest_weights[name], weights[name]) for name in weights)


def test_a_run_without_a_loss_yet():
    schedule = Plateau()
    run = FakeRun()
    schedule.step_end(run)
    assert schedule(run.clock) == 1 and run.logged == []
