"""Searches for cycles: rare within, as before afterwards."""

import gc

import pytest

from data.system.garbage_collection import RARELY, rare_searches


@pytest.fixture
def searches():
    """The generations that were searched since the test began, under Python's own thresholds."""
    found, before = [], gc.get_threshold()

    def note(phase, info):
        if phase == "stop":
            found.append(info["generation"])

    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def keep(count):
    return [[] for _ in range(count)]


def test_searches_are_rare_within_and_as_before_afterwards(searches):
    with rare_searches():
        keep(RARELY[0] // 2)
    assert searches == []
    keep(5000)
    assert len(searches) >= 5


def test_cycles_are_freed_in_the_end(searches):
    with rare_searches():
        for _ in range(RARELY[0] + 1000):
            cycle = []
            cycle.append(cycle)
    assert searches[0] == 0


def test_errors_leave_the_thresholds_as_they_were(searches):
    @rare_searches()
    def fail():
        assert gc.get_threshold() == RARELY
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert gc.get_threshold() == (700, 10, 10)
