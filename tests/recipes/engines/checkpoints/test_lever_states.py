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
from recipes.engines.checkpoints.lever_states import LEVERS, forms, gathered, joined, kept_state, separated
from recipes.training.callback import Callback
from recipes.training.lever import Lever


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
    network = sharded_network()
    state = state_of(network)
    rest, shards = separated(state, dict(network.named_parameters()))
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
    _, shards = separated(state_of(network), dict(network.named_parameters()))
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


class OfLever(Lever):
    def __init__(self, state):
        self.state_dict = lambda: state


class OfCallback(Callback):
    __init__ = OfLever.__init__


@pytest.mark.parametrize(("kind", "state", "said"), [
    (OfLever, lambda tensor: {"a": {"b": tensor, "c": [torch.ones(1)]}}, None),
    (OfLever, lambda tensor: {"a": [1, {"b": tensor}]}, "return those of a lever as values of dicts, by the names"),
    (OfLever, lambda tensor: {"a": (tensor,)}, "return those of a lever as values of dicts, by the names"),
    (OfCallback, lambda tensor: {"a": tensor}, r"return it as whole tensors, which full_tensor\(\) gives"),
    (OfCallback, lambda tensor: {"a": [tensor.full_tensor()]}, None),
])  # fmt: skip
def test_shards_that_no_run_would_load_are_refused(one_rank, kind, state, said):
    """They were saved without a word, by the first rank alone, in a checkpoint that was called damaged."""
    hooks = kind(state(sharded_network().weight.detach()))
    if said is None:
        assert kept_state("Mine", hooks) is hooks.state_dict()
    else:
        with pytest.raises(ValueError, match=f"^Mine: state_dict returns a sharded tensor .DTensor. .*; {said}"):
            kept_state("Mine", hooks)


def test_shards_by_other_names_than_those_of_parameters_are_refused(one_rank):
    """The run that was to go on could not know how they are sharded."""
    network = sharded_network()
    parameters = dict(network.named_parameters())
    with pytest.raises(ValueError, match="^Mine: state_dict returns the sharded tensor 'mean', and sharded checkpoint"):
        separated({"Mine": {"inner": {"mean": network.weight.detach()}}}, parameters)
    with pytest.raises(ValueError, match="^Mine: state_dict returns the sharded tensor 'bias', and sharded checkpoint"):
        separated({"Mine": {"bias": network.weight.detach()}}, parameters)


@pytest.mark.parametrize(("kind", "state", "said"), [
    (OfLever, {"repr": 1}, "the key 'repr', which Composer has"),
    (OfCallback, {"repr": 1}, None),
    (OfLever, None, "an instance of NoneType; return a dict"),
    (OfCallback, [1], "an instance of list; return a dict"),
])  # fmt: skip
def test_states_that_composer_would_lose_or_not_save_are_refused(kind, state, said):
    """Composer writes a text of its own under `repr` of a lever, and nothing said that the lever's was lost."""
    if said is None:
        assert kept_state("Mine", kind(state)) == state
    else:
        with pytest.raises(ValueError, match=f"^Mine: state_dict returns {said}"):
            kept_state("Mine", kind(state))
