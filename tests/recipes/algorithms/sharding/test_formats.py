"""Models with parameters of several number formats, which PyTorch gathers unit by unit."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sharding.shard import check_formats, shard, units_of
from recipes.models.task import Task
from tests.recipes.training.fake_run import FakeRun

LOW = torch.bfloat16


class Mixed(Task):
    """A block of two layers and a norm, and a layer outside."""

    def __init__(self, low=(), frozen=()):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2))
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        for name in low:
            self.get_submodule(name).to(LOW)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def blocks(self):
        return [self.block]

    def forward(self, batch):
        return batch


CASES = [
    ((), (), {}, True),
    (("block.0",), (), {}, False),
    (("first",), (), {}, False),
    (("block",), (), {}, True),
    (("block.0", "block.1"), (), {"parameters": LOW}, True),  # whose norm is gathered with the rest of the task
    (("block.0", "block.1"), (), {}, False),
    (("block",), (), {"by_block": False}, False),
    (("block.0", "block.1", "first", "last"), (), {"by_block": False, "parameters": LOW}, True),
    (("block.0",), ("block.0",), {}, torch.__version__ >= (2, 8)),
]


@pytest.mark.parametrize(("low", "frozen", "options", "passes"), CASES)
def test_what_pytorch_refuses_in_the_first_batch_is_refused_before(one_rank, low, frozen, options, passes):
    """With a traceback, after the data and the weights of a run had been loaded."""
    model = Mixed(low, frozen)
    units = units_of(model, **options)
    if passes:
        check_formats(model, units)
    else:
        with pytest.raises(ValueError, match=r"^fsdp: .* one dtype: .* is (bfloat16|float32) and .*; give them one"):
            check_formats(model, units)
    shard(model, init_device_mesh("cpu", (1,)), **options)
    try:
        model({})
    except AssertionError as error:
        assert "uniform original parameter dtype" in str(error) and not passes
    else:
        assert passes


def test_the_lever_names_the_parameters():
    model = Mixed(["block.0"])
    options = {"full_shard": False, "by_block": True, "parameters": "fp32", "replicas": 1, "sync": "batch"}
    line = "parameters of Sequential together, .* block.1.weight is float32 and block.0.weight is bfloat16; give them"
    with pytest.raises(ValueError, match=line):
        Sharding(model, **options).change_modules(FakeRun(model))
