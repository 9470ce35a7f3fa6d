"""The first rank builds the whole model, and sends the others their parts."""

import copy

import pytest
import torch
from torch import nn

from recipes.algorithms.sharding.first_rank import allocate, loose_tensors
from tests.recipes.algorithms.sharding.first_rank_ranks import BYTES, KINDS, PARTS, RUNS


@pytest.mark.slow
@pytest.mark.parametrize("check", [PARTS, BYTES, KINDS, RUNS])
def test_two_ranks(two_ranks, check):
    two_ranks(check)


class Listed(nn.Module):
    """Tensors where nothing finds them, and parameters that are registered elsewhere."""

    def __init__(self, holder):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.mask = torch.ones(2)
        self.order = [self.layer.weight]
        self.masks = holder(torch.zeros(2))


@pytest.mark.parametrize("holder", [lambda t: [t], lambda t: (t, 1), lambda t: {"causal": t}])
def test_tensors_that_would_not_be_sent_are_told(holder):
    with torch.device("meta"):
        task = nn.Sequential(Listed(holder))
    with pytest.raises(ValueError, match="^Sequential: 0.masks holds tensors, .*; register each as a buffer"):
        loose_tensors(task)
    task = nn.Sequential(Listed(holder))  # on the first rank, which has their values
    assert loose_tensors(task) == [(task[0], "mask")]


def test_attributes_lie_in_host_memory_on_all_ranks():
    """Where the first rank has them: on a GPU, moving the model leaves them there. Here meta stands for the GPU."""
    task = Listed(lambda t: None)
    first = copy.deepcopy(task).to("meta")
    assert first.layer.weight.is_meta and first.mask.device.type == "cpu"
    with torch.device("meta"):
        task = Listed(lambda t: None)
    allocate(task, loose_tensors(task), torch.device("meta"))
    assert task.layer.weight.is_meta and task.mask.device.type == "cpu"


def test_what_is_frozen_stays_frozen_on_all_ranks():
    with torch.device("meta"):
        task = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    allocate(task, [], torch.device("cpu"))
    assert [p.requires_grad for p in task.parameters()] == [False, False, True, True]
