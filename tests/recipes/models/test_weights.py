"""Weights fit exactly, or the message says where they do not."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from recipes.models.weights import load_safetensors


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.fixture
def save(tmp_path, network):
    """Writes the network's weights but for some changes; None leaves a tensor out."""

    def write(**changes):
        tensors = {**network.state_dict(), **{name.replace("_", "."): value for name, value in changes.items()}}
        save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors"

    return write


def test_all_tensors_are_taken(network, save):
    file = save(**{"1_weight": torch.full((1, 2), 7.0)})
    load_safetensors(network, file)
    assert network[1].weight.tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1_bias": None}, "missing 1.bias$"),
        ({"2_bias": torch.zeros(1)}, "unknown 2.bias$"),
        ({"1_weight": torch.zeros(1, 3)}, r"1.weight has shape \(1, 3\), the model \(1, 2\)$"),
        ({"0_weight": None, "0_bias": None, "1_weight": None, "1_bias": None, "x_y": torch.ones(1)}, "and 2 more$"),
    ],
)
def test_what_does_not_fit_changes_nothing(network, save, changes, message):
    file = save(**changes)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        load_safetensors(network, file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert all((before[name] == value).all() for name, value in network.state_dict().items())


def test_a_file_that_is_not_there(network, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such weights; expected a folder that a training run exported"):
        load_safetensors(network, tmp_path / "none.safetensors")
