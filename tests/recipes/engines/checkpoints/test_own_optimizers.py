"""States of optimizers that have none of some parameters, or get one late, where parameters are sharded."""

import pytest
import torch
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.algorithms.resilience.recipe_rates import RecipeRates
from recipes.engines.check_optimizers import check_first_step
from recipes.engines.checkpoints.conversion import from_composer, to_composer
from recipes.engines.checkpoints.own_optimizers import is_own, steps_of_nothing


class Later(torch.optim.SGD):
    """It has a state from its second step on."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            steps = self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            if steps > 1:
                self.state[parameter]["mean"] = parameter.grad.clone()


@pytest.fixture
def sharded(one_rank):
    return fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))


def after_two_steps(model, optimizer, full):
    """Its state in a checkpoint."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full, cpu_offload=full))


def load(model, optimizer, state, full):
    with steps_of_nothing():
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=full))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("momenta", [(0.9, 0.0), (0.0, 0.0)])
def test_states_of_some_parameters_or_of_none(sharded, full, momenta):
    """PyTorch asked for states of all parameters, and for a tensor among full ones. Composer gave it what it had."""

    def new():
        groups = zip(sharded.parameters(), momenta, strict=True)
        return torch.optim.SGD([{"params": [p], "momentum": momentum} for p, momentum in groups], lr=0.1)

    first, second = new(), new()
    load(sharded, second, after_two_steps(sharded, first, full), full)
    for parameter in sharded.parameters():
        one, other = (optimizer.state.get(parameter, {}) for optimizer in (first, second))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name].to_local(), other[name].to_local()) for name in one)
    assert len(second.state) >= sum(momentum > 0 for momentum in momenta)


def test_a_state_that_comes_later_cannot_be_divided(sharded):
    """PyTorch gave it the whole one, which the next step could not add to a part."""
    state = after_two_steps(sharded, Later(sharded.parameters(), lr=0.1), full=True)
    with pytest.raises(ValueError, match="^optimizer: the checkpoint has 'mean' of weight, which the optimizer"):
        load(sharded, Later(sharded.parameters(), lr=0.1), state, full=True)


def test_no_states_at_all_are_converted():
    """Sharded checkpoints leave out what is empty, and were said not to be whole."""
    timestamp = {"batch": 3, "sample": 6, "epoch": 0, "batch_in_epoch": 3, "sample_in_epoch": 6}
    optimizer = {"param_groups": [{"params": ["task.weight"], "lr": 0.1, "initial_lr": 0.1}]}
    state = {"model": {}, "optimizers": {"SGD": optimizer}, "timestamp": {"Timestamp": timestamp}, "algorithms": []}
    state |= {"callbacks": {}, "dataset_state": {"train": {}}}
    found = from_composer({"state": state, "rng": []})
    assert found["optimizer"]["state"] == {} and found["optimizer"]["param_groups"][0]["params"] == ["weight"]
    assert to_composer(found)["state"]["optimizers"]["SGD"]["state"] == {}


def test_an_optimizer_without_states_costs_no_copy_of_the_weights_when_a_run_saves(monkeypatch):
    """Each checkpoint took as much memory again as the model."""

    class Signs(torch.optim.Optimizer):
        def step(self, closure=None):
            raise AssertionError("not called")

    def clone(tensor):
        raise AssertionError("a copy")

    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer = Signs([weight], {"lr": 1.0})
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with steps_of_nothing():
        theirs._init_optim_state(optimizer)


def test_hooks_of_checks_make_no_optimizer_one_of_ones_own():
    """Loading its states would take a copy of the weights."""
    task = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(task.parameters())
    check_first_step(optimizer, task, saved=True)
    RecipeRates().built(optimizer)
    assert not is_own(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert is_own(optimizer)
