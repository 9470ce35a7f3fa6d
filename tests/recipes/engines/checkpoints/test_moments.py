"""Moments of sharded checkpoints that an optimizer would not get."""

from types import SimpleNamespace

import pytest
import torch

from recipes.engines.checkpoints.moments import check_all_asked
from recipes.engines.checkpoints.own_load_plan import OwnLoadPlan

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


def test_states_of_an_optimizer_of_pytorch_with_other_settings_are_left_out():
    """Without amsgrad, which `checkpoints.allow_changes` may allow, full checkpoints are loaded, too."""
    metadata = SimpleNamespace(planner_data=dict(enumerate([GROUPS, *moments("mean", "slow")])))
    state = {"state": {"layer.weight": {"mean": torch.zeros(2)}}, "param_groups": [{"lr": 1.0}]}
    OwnLoadPlan(own=False).set_up_planner({"optimizer": state}, metadata)
    with pytest.raises(ValueError, match="^optimizer: the sharded checkpoint has 'slow' of layer.weight, which"):
        OwnLoadPlan().set_up_planner({"optimizer": state}, metadata)
