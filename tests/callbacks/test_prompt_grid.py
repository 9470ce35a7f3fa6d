"""Which images a rank draws. Two ranks that share them are in tests/callbacks/grid_ranks.py."""

from hypothesis import given
from hypothesis import strategies as st

from callbacks.prompt_grid import numbers_of


@given(st.integers(1, 300), st.integers(1, 70))
def test_ranks_draw_each_image_and_equally_many(count, ranks):
    parts = [numbers_of(count, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) < count / ranks + 1
    drawn = [number for part in parts for number in part]
    assert drawn[:count] == list(range(count)) and set(drawn[count:]) <= {count - 1}
