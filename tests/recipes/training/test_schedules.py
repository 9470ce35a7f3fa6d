"""Learning rates over a run: Composer's where that has the same schedule, and constant after its end."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer import Time
from composer.core import Timestamp
from composer.optim import CosineAnnealingWithWarmupScheduler, LinearWithWarmupScheduler
from hypothesis import given
from hypothesis import strategies as st

from recipes.training.callback import Callback
from recipes.training.clock import Clock
from recipes.training.schedules import checked, constant, cosine, linear


def clock_at(batch, duration, epoch=None):
    return Clock(batch=batch, sample=batch * 8, epoch=batch // (epoch or 1), duration=duration, epoch_batches=epoch)


def composers(scheduler, batch, duration):
    """The factor of one of Composer's schedulers."""
    timestamp = Timestamp(batch=batch, sample=batch * 8)
    return scheduler(
        SimpleNamespace(timestamp=timestamp, max_duration=Time.from_timestring(duration), dataloader_len=None)
    )


@pytest.mark.filterwarnings("ignore:\nThe warmup duration is 0")
@pytest.mark.parametrize(
    ("schedule", "theirs"), [(cosine, CosineAnnealingWithWarmupScheduler), (linear, LinearWithWarmupScheduler)]
)
@given(batches=st.integers(2, 1000), warmup=st.integers(0, 1000), final=st.floats(0, 1), share=st.floats(0, 1))
def test_a_schedule_over_the_whole_run_is_composers(schedule, theirs, batches, warmup, final, share):
    batch, duration = int(share * batches), f"{batches}ba"
    expected = composers(theirs(t_warmup=f"{warmup}ba", alpha_f=final), batch, duration)
    found = schedule(warmup=f"{warmup}ba", final=final)(clock_at(batch, duration))
    assert found == pytest.approx(expected, abs=1e-9)


def test_constant_after_a_warm_up():
    schedule = constant(warmup="4ba")
    assert [schedule(clock_at(batch, "8ba")) for batch in (0, 1, 2, 4, 8)] == [0, 0.25, 0.5, 1, 1]
    assert constant()(clock_at(0, "8ba")) == 1


@pytest.mark.parametrize(("duration", "epoch"), [("20ba", None), ("160sp", None), ("5ep", 4)])
def test_units(duration, epoch):
    values = [cosine(final=0.2)(clock_at(batch, duration, epoch)) for batch in (0, 10, 20)]
    assert values == pytest.approx([1, 0.6, 0.2])


def test_it_stays_at_its_end():
    """The dVAE's: 1e-4 to 1.25e-6 over 1,200,000 of 3,000,000 batches."""
    schedule = cosine(final=0.0125, over="1200000ba")
    rates = [1e-4 * schedule(clock_at(batch, "3000000ba")) for batch in (0, 600_000, 1_200_000, 2_000_000, 3_000_000)]
    assert rates == pytest.approx([1e-4, (1e-4 + 1.25e-6) / 2, 1.25e-6, 1.25e-6, 1.25e-6], rel=1e-9)
    assert cosine(warmup="5ba", over="0.5dur")(clock_at(15, "20ba")) == 0


@pytest.mark.parametrize("over", ["10ba", "4ba"])
def test_a_warm_up_that_leaves_no_room_for_the_cosine(over):
    """What follows it is constant at the end's rate, as after any other cosine, and not at the peak."""
    schedule = cosine(warmup="10ba", over=over, final=0.1)
    assert [schedule(clock_at(batch, "100ba")) for batch in (5, 9, 11, 100)] == pytest.approx([0.5, 0.9, 0.1, 0.1])


def test_a_warm_up_in_another_unit():
    message = "schedule: a warm-up of 5ba cannot be taken from 1dur of a run of 160sp; give both in the same unit"
    with pytest.raises(ValueError, match=message):
        cosine(warmup="5ba")(clock_at(0, "160sp"))


@pytest.mark.parametrize("schedule", [cosine, linear])
def test_rates_below_zero_are_refused(schedule):
    with pytest.raises(ValueError, match="schedule: final: -0.1; give 0 or more"):
        schedule(final=-0.1)


def test_a_cosine_over_nothing_is_refused():
    with pytest.raises(ValueError, match="schedule: over: 0ba; give a length above 0"):
        cosine(over="0ba")


@pytest.mark.parametrize("factor", [1.5, 0, np.float64(0.25), torch.tensor(0.5)])
def test_factors_of_own_schedules_are_numbers_of_python(factor):
    """With one of NumPy's in its groups, no run could go on from a checkpoint."""
    number = checked(lambda clock: factor, "mine")(clock_at(3, "10ba"))
    assert type(number) is float and number == factor


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf"), None, "half", [0.1, 0.2]])
def test_no_learning_rate_is_negative_or_not_finite(factor):
    with pytest.raises(ValueError, match="^schedule: mine gives .* at batch 3; give a finite factor of 0 or more$"):
        checked(lambda clock: factor, "mine")(clock_at(3, "10ba"))


def test_a_schedule_that_keeps_something_is_a_callback():
    """Its state was in no checkpoint, so that a resumed run silently had other rates."""

    class Counts:
        def __call__(self, clock):
            return 1.0

        def state_dict(self):
            return {}

    class Told(Counts, Callback):
        pass

    with pytest.raises(ValueError, match="^schedule: mine has state_dict, which a run calls of callbacks alone"):
        checked(Counts(), "mine")
    assert checked(Told(), "mine")(clock_at(3, "10ba")) == 1.0
