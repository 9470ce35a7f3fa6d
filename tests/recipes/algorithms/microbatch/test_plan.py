"""The sizes that the search for the largest microbatch proposes, and that no trial of one runs out of memory."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recipes.algorithms.microbatch.device_memory import Reading
from recipes.algorithms.microbatch.search import HEADROOM, MicrobatchPlan, even
from tests.recipes.algorithms.microbatch.small import MB, FakeMemory


@pytest.mark.parametrize(
    "largest, batch, size",
    [(300, 256, 256), (100, 256, 64), (128, 256, 128), (50, 96, 48), (50, 97, 49), (40, 100, 25), (2, 7, 2), (1, 5, 1)],
)
def test_even_parts(largest, batch, size):
    assert even(largest, batch) == size


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_even_parts_fit_and_are_no_more_than_twice_as_many(largest, batch):
    size = even(largest, batch)
    assert 1 <= size <= min(largest, batch)
    assert 2 * size >= min(largest, batch) or -(-batch // size) == -(-batch // largest)


def search_alone(memory, batch, to_come=0):
    """The sizes that a single rank tries, the last one twice where it is kept."""
    plan, size, sizes = MicrobatchPlan(batch), 1, []
    while len(sizes) < 100:
        sizes.append(size)
        reading = memory.read(size)
        plan.record(size, reading)
        following = plan.next(size, reading, to_come)
        if following == size:
            return sizes
        if following < size:
            plan.lower(following)
        size = following
    raise AssertionError(f"no end: {sizes}")


def test_sizes_that_are_tried():
    # 0.9 * 80 GB less 14 GB held leaves 58 GB, of which 4 do not grow: 108 samples of 0.5 GB, a divisor of 64.
    memory = FakeMemory(80_000 * MB, held=14_000 * MB, fixed=4_000 * MB, each=500 * MB)
    assert search_alone(memory, 256) == [1, 2, 8, 32, 64]
    assert search_alone(memory, 48) == [1, 2, 8, 32, 48]
    assert search_alone(memory, 1) == [1]
    assert search_alone(memory, 256, to_come=30_000 * MB) == [1, 2, 8, 32]


def test_what_does_not_grow_hides_what_does():
    """The optimizer's step needs more than small microbatches: a flat start, then 1 GB a sample."""
    memory = FakeMemory(80_000 * MB, held=14_000 * MB, fixed=0, each=1_000 * MB, floor=20_000 * MB)
    assert search_alone(memory, 256)[-1] == 32
    assert max(search_alone(memory, 256)) <= 64


def test_what_comes_later_is_left_free_while_growth_is_hidden():
    """By the line all of 64 samples fit. If all of 30 MB were proportional, 4 samples would take what 40 MB leave."""
    memory = FakeMemory(100 * MB, held=0, fixed=0, each=1, floor=30 * MB)
    assert search_alone(memory, 64, to_come=40 * MB) == [1, 2, 4, 8, 16, 32, 64]
    assert search_alone(memory, 64) == [1, 2, 6, 20, 64]


def test_what_takes_all_of_the_room_fits():
    """The 100 bytes of 900 beside the 800 that are held, whatever the size; and no byte at all."""
    assert search_alone(FakeMemory(1_000, held=800, fixed=100, each=0), 8)[-1] == 8
    assert search_alone(FakeMemory(1_000, held=0, fixed=0, each=0), 8)[-1] == 8


def test_a_size_to_which_the_search_went_down_is_not_divided_again():
    """Parts of 50 are those of 99 samples where 83 fit; where 50 fit, they would be 33."""
    plan = MicrobatchPlan(99)
    for size in (25, 50):
        plan.record(size, Reading(0, 18 * size, 1_000))
    assert plan.next(50, Reading(0, 900, 1_000)) == 33
    plan.lower(50)
    assert plan.next(50, Reading(0, 900, 1_000)) == 50


def test_a_search_that_went_down_does_not_go_up_again():
    """Measurements of one size may differ: those of cached memory, or before and after an average has begun."""
    plan, plenty, full = MicrobatchPlan(64), Reading(0, 10 * MB, 1_000 * MB), Reading(0, 10 * MB, 10 * MB)
    for size in (8, 16):  # a flat start
        plan.record(size, plenty)
    assert plan.next(16, plenty) == 64 and plan.next(16, full) == 8
    plan.lower(16)
    assert plan.next(16, plenty) == 16


def test_what_was_measured_fits_beside_what_is_held_and_what_comes_later():
    """As compiled modules take it, while an average has not begun."""
    plan = MicrobatchPlan(64)
    plan.record(16, Reading(0, 50, 100))
    assert plan.fits(16, Reading(40, 50, 100)) and plan.fits(16, Reading(10, 50, 100), to_come=30)
    assert not plan.fits(16, Reading(41, 50, 100)) and not plan.fits(16, Reading(10, 50, 100), to_come=31)


def test_too_little_for_headroom_stays_at_one():
    assert search_alone(FakeMemory(10_000 * MB, held=9_000 * MB, fixed=100 * MB, each=100 * MB), 64) == [1]


@given(
    batch=st.integers(1, 2048),
    usable=st.integers(1_000, 200_000),
    held=st.floats(0.0, 0.8),
    first=st.floats(0.01, 0.99),
    share=st.floats(0.0, 1.0),
    floor=st.floats(0.0, 0.99),
    to_come=st.floats(0.0, 0.1),
)
@example(batch=99, usable=1000, held=0.0, first=0.01171875, share=1.0, floor=0.5, to_come=0.0)  # down to 50, not 33
@example(batch=77, usable=1000, held=0.75, first=0.0390625, share=0.34375, floor=0.3125, to_come=0.03125)  # 26, not 39
def test_no_trial_runs_out_and_the_end_is_the_largest_that_fits(batch, usable, held, first, share, floor, to_come):
    """Over devices of all sizes: growth is constant, linear, or constant and then linear."""
    usable = usable * MB
    free = usable * (1 - held)
    each = max(int(first * share * free), 1)
    memory = FakeMemory(usable, int(held * usable), int(first * (1 - share) * free), each, int(floor * free))
    later = int(to_come * free)
    sizes = search_alone(memory, batch, later)
    assert len(sizes) <= 20
    fits = [size for size in sizes if memory.held + memory.growth(size) + later <= usable]
    assert fits == [size for size in sizes if size > 1 or size in fits]  # nothing but a first trial can run out
    room = HEADROOM * usable - memory.held - later
    last = sizes[-1]
    if memory.growth(1) <= room:
        assert memory.growth(last) <= room
        largest = batch
        if memory.growth(batch) > room:
            largest = min(batch, max(1, int((room - memory.fixed) / memory.each)))
        # The largest, or where growth that may be proportional keeps the search from one sample more. The line through
        # a size whose growth is hidden, and one that was too large, is above the growth of those between them.
        wall = usable - memory.held - later
        before = max(sizes[:-2], default=1)
        hidden = len(sizes) > 1 and last < sizes[-2] and memory.growth(before) == memory.floor and 2 * last > before
        assert last == even(largest, batch) or int(last * wall / memory.growth(last)) == last or hidden
