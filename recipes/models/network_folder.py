"""The folder of an exported network: config.json with its sizes, and its weights as safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from data.system.files import write_json
from recipes.models.task import Task
from recipes.models.tensor_plan import TensorPlan
from recipes.models.weights import (
    Upgrade,
    check_config,
    load_safetensors,
    open_network,
    read_safetensors,
    save_safetensors,
)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FOLDER, FOLDER_AVERAGE = "transformer", "transformer_ema"  # of a transformer in an export, and of its average
Network = TypeVar("Network", bound=nn.Module)


def save_network(folder: Path, network: nn.Module, sizes: dict[str, Any], weights: str = WEIGHTS) -> None:
    """Write a network to a folder.

    Args:
        folder: is made where it is missing, with its parents.
        network: its state dict is written.
        sizes: arguments that build it again, as JSON-compatible values.
        weights: name of the file of its weights.
    """
    save_sizes(folder, sizes)
    save_safetensors(network.state_dict(), folder / weights)


def save_sizes(folder: Path, sizes: dict[str, Any]) -> None:
    """Write config.json, all of a network's folder but its weights. Arguments as of `save_network`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, sizes, indent=2)


def load_network(
    folder: Path, build: Callable[..., Network], upgrade: Upgrade | None = None, weights: str = WEIGHTS
) -> Network:
    """The network in a folder that `save_network` wrote. Only JSON and safetensors are read.

    Args:
        folder: of the network.
        build: takes the sizes, and returns a network with new weights.
        upgrade: see `read_safetensors`.
        weights: name of the file of its weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the tensors do not have the sizes of config.json, or a file is damaged.
    """
    tensors = read_safetensors(folder / weights, upgrade)
    return open_network(folder / CONFIG, lambda sizes: build(**sizes), tensors, folder / weights)


def load_into(
    network: nn.Module,
    folder: Path,
    sizes: dict[str, Any],
    upgrade: Upgrade | None = None,
    weights: str = WEIGHTS,
) -> None:
    """Load the weights in a folder that `save_network` wrote into a network of the same sizes.

    Args:
        network: is loaded into.
        folder: of the weights.
        sizes: of `network`, as `save_network` takes them.
        upgrade: see `read_safetensors`.
        weights: name of the file of the weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the weights are those of another network, or a file is damaged.
    """
    load_safetensors(network, folder / weights, upgrade)
    check_config(sizes, folder / CONFIG)


class TransformerTask(Task):
    """A task whose export is one transformer, in the folder transformer/, which `load_network` opens.

    Attributes:
        network: the transformer.
        sizes: arguments that build it again, as JSON-compatible values.
        upgrade: of the weights that an earlier version exported; see `read_safetensors`.
    """

    exports_average_beside = True
    exported = "network"
    upgrade: ClassVar[Upgrade | None] = None
    network: nn.Module
    sizes: dict[str, Any]

    def blocks(self) -> list[nn.Module]:
        """The residual blocks, attention and MLP in turn."""
        return list(self.network.blocks)

    def tensor_plan(self) -> TensorPlan:
        """See the transformer's `tensor_plan`."""
        return self.network.tensor_plan()

    def forward_flops(self) -> float:
        """See the transformer's `forward_flops`."""
        return self.network.forward_flops()

    def export(self, folder: Path) -> None:
        """Write transformer/config.json and safetensors."""
        save_network(folder / FOLDER, self.network, self.sizes)

    def export_average(self, folder: Path) -> None:
        """Write transformer_ema/ beside transformer/. See `Task.export_average`."""
        save_network(folder / FOLDER_AVERAGE, self.network, self.sizes)

    def export_config(self, folder: Path, averaged: bool) -> Path:
        """See `Task.export_config`."""
        inner = folder / (FOLDER_AVERAGE if averaged else FOLDER)
        save_sizes(inner, self.sizes)
        return inner / WEIGHTS

    def load_export(self, folder: Path) -> None:
        """See `Task.load_export`."""
        load_into(self.network, folder / FOLDER, self.sizes, self.upgrade)
