"""The folder of an exported network: config.json with its sizes, and its weights as safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import nn

from data.files import write_json
from recipes.models.config_files import build_from
from recipes.models.weights import Upgrade, load_tensors, read_safetensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FOLDER, FOLDER_AVERAGE = "transformer", "transformer_ema"  # of a transformer in an export, and of its average
Network = TypeVar("Network", bound=nn.Module)


def save_network(folder: Path, network: nn.Module, sizes: dict[str, Any]) -> None:
    """Write a network to a new folder.

    Args:
        folder: is made, with its parents.
        network: its state dict is written.
        sizes: arguments that build it again, as JSON-compatible values.

    Raises:
        FileExistsError: the folder is there.
    """
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, sizes, indent=2)
    save_file(network.state_dict(), folder / WEIGHTS)


def load_network(folder: Path, build: Callable[..., Network], upgrade: Upgrade | None = None) -> Network:
    """The network in a folder that `save_network` wrote. Only JSON and safetensors are read.

    Args:
        folder: of the network.
        build: takes the sizes, and returns a network with new weights.
        upgrade: see `read_safetensors`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the tensors do not have the sizes of config.json, or a file is damaged.
    """
    tensors = read_safetensors(folder / WEIGHTS, upgrade)
    network = build_from(folder / CONFIG, lambda sizes: build(**sizes), tensors)
    load_tensors(network, tensors, folder / WEIGHTS)
    return network
