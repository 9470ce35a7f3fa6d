"""Look-ups in several threads."""

import itertools
import time

import pytest

from data.system.side_by_side import AHEAD, GROUP, side_by_side


def test_results_come_in_order():
    def look_up(item: int) -> int:
        time.sleep(0.002 * (item % GROUP == 0 and item // GROUP % 3))
        return item**2

    for count in (0, 1, GROUP, 3 * AHEAD * GROUP + 5):
        assert list(side_by_side(look_up, range(count))) == [item**2 for item in range(count)]


def test_the_first_error_in_order_is_raised():
    def look_up(item: int) -> int:
        if item in (GROUP + 3, 5 * GROUP):
            time.sleep(0.05 * (item < 2 * GROUP))  # the other one comes earlier
            raise ValueError(item)
        return item

    found = []
    with pytest.raises(ValueError, match=f"^{GROUP + 3}$"):
        found.extend(side_by_side(look_up, range(100 * GROUP)))
    assert found == list(range(GROUP))


def test_few_results_are_held():
    items = itertools.count()
    found = side_by_side(lambda item: item, items)
    assert [next(found) for _ in range(40)] == list(range(40))
    assert next(items) <= (AHEAD + 4) * GROUP
    found.close()
