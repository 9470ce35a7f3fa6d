"""Gradients that are averaged block by block; tests/recipes/engines/test_equality.py compares runs."""

import pytest

from tests.recipes.algorithms.gradients import all_reduce_ranks


@pytest.mark.slow
@pytest.mark.parametrize("check", all_reduce_ranks.CHECKS)
def test_two_ranks(two_ranks, check):
    two_ranks(check)
