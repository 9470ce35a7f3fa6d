"""Moments of sharded checkpoints that an optimizer would not get."""

from types import SimpleNamespace

import pytest

from recipes.engines.checkpoints.moments import check_all_asked

GROUPS = ("optimizer", "param_groups", 0, "lr")


def moments(*names):
    return [("optimizer", "state", "layer.weight", name) for name in names]


@pytest.mark.parametrize("asked", [["mean"], []])
def test_states_that_the_first_step_does_not_make_are_not_silently_new(asked):
    """PyTorch reads those of an optimizer that has made one step."""
    metadata = SimpleNamespace(planner_data=dict(enumerate([GROUPS, *moments("mean", "slow")])))
    check_all_asked(dict(enumerate([GROUPS, *moments("mean", "slow", "later")])), metadata)
    check_all_asked({0: ("weights", "layer.weight")}, metadata)
    with pytest.raises(ValueError, match="^optimizer: the sharded checkpoint has '(slow|mean)' of layer.weight, which"):
        check_all_asked(dict(enumerate([GROUPS, *moments(*asked)])), metadata)
