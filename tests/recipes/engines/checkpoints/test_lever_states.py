"""States of levers in sharded checkpoints. Averages on two ranks are in tests/recipes/algorithms/averaging."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipes.algorithms.sharding.shards import as_shard, own
from recipes.engines.checkpoints.lever_states import LEVERS, forms, gathered, joined, separated


def sharded_network(width=4):
    torch.manual_seed(width)
    mesh = init_device_mesh("cpu", (1,))
    return fully_shard(nn.Linear(width, 2), mesh=mesh)


def state_of(network):
    """Of two levers: sharded tensors in another dtype, a plain tensor and plain values at two depths."""
    with torch.no_grad():
        shards = {name: as_shard(p, 2 * own(p).double()) for name, p in network.named_parameters()}
    return {
        "Average": {"begun": 3, "average": {**shards, "scale": torch.ones(2)}},
        "Clip": {},
        "Sums": {"errors": {"weight": shards["weight"]}, "rank": 2},
    }


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def test_shards_are_separated_and_joined_again(one_rank):
    state = state_of(sharded_network())
    rest, shards = separated(state)
    assert shards == {
        "Average": {"average": {n: state["Average"]["average"][n] for n in ("weight", "bias")}},
        "Sums": {"errors": {"weight": state["Sums"]["errors"]["weight"]}},
    }
    assert same(rest["Average"]["average"], {"scale": torch.ones(2)}) and rest["Clip"] == {}
    assert same(joined(rest, shards), state)


def test_a_full_checkpoint_has_whole_tensors(one_rank):
    network = sharded_network()
    found = gathered(state_of(network))
    weight = network.weight.full_tensor().detach()
    assert same(found["Sums"], {"errors": {"weight": 2 * weight.double()}, "rank": 2})
    assert found["Average"]["begun"] == 3 and same(found["Average"]["average"]["scale"], torch.ones(2))


def saved(network, folder: Path):
    _, shards = separated(state_of(network))
    dcp.save({LEVERS: shards}, checkpoint_id=folder)
    return dcp.FileSystemReader(folder).read_metadata(), shards


def test_the_loader_fills_what_forms_gives_it(one_rank, tmp_path):
    network = sharded_network()
    metadata, shards = saved(network, tmp_path)
    found = forms(metadata, network)
    assert all(isinstance(tensor, DTensor) for tensor in found["Average"]["average"].values())
    dcp.load({LEVERS: found}, checkpoint_id=tmp_path)
    assert same(found, shards)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: sharded_network(5), r"weight has shape \(2, 4\), but the model has a parameter of shape \(2, 5\)"),
        (lambda: nn.Sequential(sharded_network()), r"\.\w+ has shape .*, but the model has no such parameter"),
    ],
)
def test_tensors_of_other_parameters_are_refused(one_rank, tmp_path, other, message):
    metadata, _ = saved(sharded_network(), tmp_path)
    with pytest.raises(ValueError, match=message):
        forms(metadata, other())
