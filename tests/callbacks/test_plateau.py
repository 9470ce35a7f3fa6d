"""Halving on plateaus: the rule alone, and the rate of a run that is broken off and goes on."""

import math

import pytest
import torch
from composer import Callback
from hypothesis import given
from hypothesis import strategies as st

from callbacks.plateau import Plateau, PlateauRule
from recipes.engines.composer.trainer import build_trainer

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


@pytest.mark.parametrize("wrong", [{"window": 0}, {"patience": 0}, {"factor": 1.0}, {"threshold": -0.1}, {"limit": -1}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(ValueError, match="plateau: "):
        Plateau(**wrong)


class Rates(Callback):
    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(state.schedulers[0].get_last_lr()[0])


def test_the_rate_of_a_run(small_recipe, tmp_path):
    """A loss that cannot fall: rates are halved to the limit, and a resumed run has the rates of the whole one."""
    schedule = "schedule={name: plateau, warmup: 3ba, window: 2, patience: 1, threshold: 0.9, limit: 2}"

    def run(name, duration, *changes):
        recipe = small_recipe(
            tmp_path / name, schedule, f"training.duration={duration}ba", "checkpoints.every=7ba", "evals.val=null",
            *changes,
        )  # fmt: skip
        trainer = build_trainer(recipe)
        rates = Rates()
        trainer.state.callbacks.append(rates)
        trainer.fit()
        trainer.close()
        return rates.values, torch.cat([p.detach().flatten() for p in trainer.state.model.parameters()])

    whole, weights = run("whole", 12)
    peak = 2e-3
    # Composer sets the rate of a batch's successor by the number of batches before the batch itself.
    assert whole[:4] == pytest.approx([0, peak / 3, peak * 2 / 3, peak])
    # The means of batches 3 and 4, 5 and 6, 7 and 8: the first, and two that are not a tenth of it.
    assert whole[4:] == pytest.approx([peak] * 2 + [peak / 2] * 2 + [peak / 4] * 4)
    run("part", 12, "training.duration=7ba")
    checkpoint = next((tmp_path / "part" / "checkpoints").glob("*ba7-rank0.pt"))
    resumed, resumed_weights = run("part2", 12, f"checkpoints.load_path={checkpoint}")
    assert resumed == whole[7:]
    assert (resumed_weights == weights).all()
