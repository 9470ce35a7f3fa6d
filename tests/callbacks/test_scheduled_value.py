"""Values of the model that a run moves: their shape by property, their steps by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callbacks.scheduled_value import ScheduledValue, between
from recipes.models.dvae.task import DiscreteAutoencoder
from recipes.models.task import Task
from recipes.training.clock import Clock
from tests.recipes.training.fake_run import FakeRun

numbers = st.floats(-1e3, 1e3)
shares = st.floats(0, 1)
shapes = st.sampled_from(["cosine", "linear"])


@given(start=numbers, end=numbers, one=shares, other=shares, shape=shapes)
def test_values_go_one_way_from_start_to_end(start, end, one, other, shape):
    assert between(start, end, 0, shape) == start
    assert between(start, end, 1, shape) == between(start, end, 7.5, shape) == end
    low, high = sorted((one, other))
    change = between(start, end, high, shape) - between(start, end, low, shape)
    assert change * (end - start) >= -1e-9
    assert min(start, end) - 1e-9 <= between(start, end, one, shape) <= max(start, end) + 1e-9


@given(start=numbers, end=numbers, share=shares)
def test_shapes(start, end, share):
    size = abs(end - start) + 1e-3
    assert between(start, end, share, "linear") == pytest.approx(start + share * (end - start), abs=1e-9 * size)
    cosine = end + (start - end) * (1 + math.cos(math.pi * share)) / 2
    assert between(start, end, share, "cosine") == pytest.approx(cosine, abs=1e-9 * size)
    # Symmetric about the middle.
    mirrored = between(start, end, share, "cosine") + between(start, end, 1 - share, "cosine")
    assert mirrored == pytest.approx(start + end, abs=1e-9 * size + 1e-9)


def task():
    return DiscreteAutoencoder(codes=4, hidden=4, blocks=1, initial=2)


def values(over, duration, batches, epoch=None, first=0, value="temperature", **options):
    """The value at each batch of a run of so many batches, from batch `first` on."""
    model = task()
    run = FakeRun(model)
    arguments = {"start": 1.0, "end": 0.0625, "over": over, **options}
    callback = ScheduledValue(model, value=value, **arguments)
    found = []
    for batch in range(first, batches):
        run.clock = Clock(batch, batch * 8, batch // (epoch or 1), duration, epoch)
        if batch == first:
            callback.begin(run)
            assert run.logged == []
        callback.batch_start(run)
        found.append(float(getattr(model, value)))
    assert run.logged == [
        (batch, {f"schedule/{value}": pytest.approx(number, rel=1e-6)})
        for batch, number in zip(range(first, batches), found, strict=True)
    ]
    return found


def test_the_published_schedules():
    temperatures = values("150000ba", "3000000ba", 150_002, first=149_998)
    assert temperatures[-2:] == [0.0625, 0.0625] and temperatures[0] == pytest.approx(0.0625, rel=1e-6)
    assert values("150000ba", "3000000ba", 75_001, first=75_000) == [pytest.approx((1 + 1 / 16) / 2)]
    betas = values("5000ba", "3000000ba", 1251, first=1250, value="beta", start=0.0, end=6.6)
    assert betas == [pytest.approx(6.6 * (1 - math.sqrt(0.5)) / 2)]


@pytest.mark.parametrize(
    ("over", "duration", "epoch"),
    [("8ba", "12ba", None), ("0.5dur", "16ba", None), ("64sp", "12ba", None), ("2ep", "12ba", 4), ("0.5dur", "4ep", 4)],
)
def test_lengths_in_any_unit(over, duration, epoch):
    expected = [between(1, 0.0625, batch / 8, "cosine") for batch in range(12)]
    assert values(over, duration, 12, epoch) == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_goes_on_exactly():
    whole = values("10ba", "12ba", 12)
    assert values("10ba", "12ba", 12, first=5) == whole[5:]


def test_no_length_is_the_end_at_once():
    assert values("0ba", "3ba", 2) == [0.0625, 0.0625]


def test_a_change_ends_in_batches_larger_than_those_of_now():
    """Of 80 batches of the present size, 10 that were eight times as large had the samples: the middle came before."""
    run = FakeRun(task())
    run.clock = Clock(10, 640, 0, "20ba", epoch_batches=100, epoch_began=-70)
    ScheduledValue(run.task, value="temperature", start=1.0, end=0.0625, over="0.5ep", shape="linear").begin(run)
    assert float(run.task.temperature) == 0.0625


def test_a_line():
    assert values("4ba", "8ba", 6, shape="linear", start=0.0, end=2.0, value="beta") == [0, 0.5, 1, 1.5, 2, 2]


def test_a_value_that_the_model_has_not():
    with pytest.raises(ValueError, match="has no value `tau` to be scheduled; it has: beta, temperature"):
        ScheduledValue(task(), value="tau", start=0.0, end=1.0)
    with pytest.raises(ValueError, match="has no value `weight` to be scheduled; it has: none"):
        ScheduledValue(Task(), value="weight", start=0.0, end=1.0)


@pytest.mark.parametrize(
    ("value", "start", "end", "message"),
    [
        ("temperature", 1.0, 0.0, "scheduled_value: end: dvae: temperature: 0.0; give a number above 0"),
        ("temperature", -1.0, 0.1, "scheduled_value: start: dvae: temperature: -1.0; give a number above 0"),
        ("beta", 0.0, -0.1, "scheduled_value: end: dvae: beta: -0.1; give 0 or more"),
    ],
)
def test_a_value_that_the_model_cannot_train_with(value, start, end, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ScheduledValue(task(), value=value, start=start, end=end)
