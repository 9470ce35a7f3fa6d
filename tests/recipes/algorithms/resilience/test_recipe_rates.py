"""The recipe's rates in place of a checkpoint's; runs that resume with others are in test_equality.py."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from recipes.algorithms.resilience.recipe_rates import RecipeRates


@pytest.mark.parametrize(
    ("saved", "rate"),
    [
        ({"lr": 0.03, "initial_lr": 0.1}, 0.06),  # the same share of the peak
        ({"lr": 0.1 + 0.2, "initial_lr": 0.2}, 0.1 + 0.2),  # the same peak: in every bit
        ({"lr": 0.03}, 0.2),  # the peak is not known, or there was none
        ({"lr": 0.0, "initial_lr": 0.0}, 0.2),
    ],
)
def test_rates_after_a_checkpoint_has_been_loaded(saved, rate):
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.2, weight_decay=0.5)
    lever, told = RecipeRates(), []
    lever.built(optimizer)
    first, second = optimizer.param_groups
    first.update(saved | {"weight_decay": 0.1})
    params = second["params"]
    second.clear()  # as PyTorch leaves one that the checkpoint does not have
    second["params"] = params
    lever.loaded(SimpleNamespace(optimizer=optimizer, peak_rates_changed=lambda: told.append(first["initial_lr"])))
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(rate, rel=1e-12)] * 2
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.2, 0.2] and told == [0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    if saved.get("initial_lr") == 0.2:
        assert first["lr"] == saved["lr"]


class Counts(torch.optim.Optimizer):
    """Keeps the number of its steps in its groups."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0})


def test_counts_stay_those_of_the_checkpoint():
    optimizer, lever = Counts([nn.Parameter(torch.ones(2))], lr=0.2, beta=0.5), RecipeRates()
    lever.built(optimizer)
    (group,) = optimizer.param_groups
    group.update({"lr": 0.1, "initial_lr": 0.2, "beta": 0.9, "steps": 7})
    lever.loaded(SimpleNamespace(optimizer=optimizer, peak_rates_changed=lambda: None))
    assert (group["steps"], group["beta"], group["lr"]) == (7, 0.5, 0.1)


@pytest.mark.parametrize("fused", [True, False])
def test_counts_of_steps_are_where_the_recipe_wants_them(fused):
    """They stayed on the host, whose memory the fused kernel of a GPU then read; and on the GPU, for which the host
    waited at each parameter. Tensors without memory stand for those of a GPU."""
    parameter, lever = nn.Parameter(torch.ones(2, device="meta")), RecipeRates()
    optimizer = torch.optim.AdamW([parameter], lr=0.2)
    (group,) = optimizer.param_groups
    group["fused"] = fused  # PyTorch makes none with parameters that have no memory
    lever.built(optimizer)
    optimizer.state[parameter]["step"] = torch.tensor(3.0, device="cpu" if fused else "meta")
    group.update({"lr": 0.2, "initial_lr": 0.2, "fused": not fused})
    moved = mock.patch.object(torch.Tensor, "to", lambda tensor, device: torch.empty_like(tensor, device=device))
    with moved:  # one without memory cannot be copied
        lever.loaded(SimpleNamespace(optimizer=optimizer, peak_rates_changed=lambda: None))
    assert optimizer.state[parameter]["step"].device.type == ("meta" if fused else "cpu")
    assert group["fused"] is fused


class CountsInGroups(torch.optim.SGD):
    """Keeps the number of its steps in its groups, and not in its defaults. Each group has a factor, too."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group |= {"steps": 0, "factor": 2.0}

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1


def test_numbers_of_groups_that_a_step_changes_are_counts():
    """They began again at 0."""
    optimizer, lever = CountsInGroups([nn.Parameter(torch.ones(2))], lr=0.2), RecipeRates()
    lever.built(optimizer)
    (group,) = optimizer.param_groups
    optimizer.step()  # as PyTorch, to find out the states that it has
    group.update({"lr": 0.1, "initial_lr": 0.2, "factor": 1.0, "steps": 7})
    lever.loaded(SimpleNamespace(optimizer=optimizer, peak_rates_changed=lambda: None))
    assert (group["steps"], group["factor"]) == (7, 2.0)


def test_a_peak_rate_that_is_a_tensor_stays_what_it_was():
    """Schedules fill it in place."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5), fused=True)
    lever = RecipeRates()
    lever.built(optimizer)
    (group,) = optimizer.param_groups
    group["lr"].fill_(0.0)  # the first batch of a warm-up
    group.update({"lr": torch.tensor(0.125), "initial_lr": torch.tensor(0.25)})
    lever.loaded(SimpleNamespace(optimizer=optimizer, peak_rates_changed=lambda: None))
    assert (group["lr"].item(), group["initial_lr"].item()) == (0.25, 0.5)
