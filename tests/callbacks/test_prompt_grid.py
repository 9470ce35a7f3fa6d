"""Which images a rank draws, and errors. Two ranks that share images are in tests/callbacks/grid_ranks.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callbacks.prompt_grid import numbers_of
from callbacks.sample_grid import SampleGrid
from callbacks.token_grid import TokenGrid


@given(st.integers(1, 300), st.integers(1, 70))
def test_ranks_draw_each_image_and_equally_many(count, ranks):
    parts = [numbers_of(count, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) < count / ranks + 1
    drawn = [number for part in parts for number in part]
    assert drawn[:count] == list(range(count)) and set(drawn[count:]) <= {count - 1}


@pytest.mark.parametrize(("kind", "component"), [(SampleGrid, "sample_grid"), (TokenGrid, "token_grid")])
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"prompts": []}, "prompts is empty"), ({"batch": 0}, "batch: 0; give 1"), ({"seed": 2**62}, "seed: 4611")],
)
def test_errors_name_the_component_of_the_recipe(kind, component, wrong, fault):
    with pytest.raises(ValueError, match=f"^{component}: {fault}"):
        kind(None, "", None, None, None, 1, **{"prompts": ["a cat"], **wrong})
