"""Strict loading of weights: safetensors, folders of diffusers, or state dicts that hold tensors only."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.system.errors import first_line
from data.system.memory import NotEnoughMemory, memory_to_read
from recipes.models import torch_files
from recipes.models.config_files import build_from
from recipes.models.json_files import read_object

Upgrade = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Network = TypeVar("Network", bound=nn.Module)


def save_safetensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a state dict, of which channels_last may have changed the memory format: safetensors takes only contiguous
    tensors. A parameter that several modules share is written under each of its names, because safetensors refuses
    tensors that share memory."""
    written: dict[str, Tensor] = {}
    memory: set[int] = set()  # addresses
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        address = tensor.untyped_storage().data_ptr()
        written[name] = tensor.clone() if address in memory else tensor
        memory.add(address)
    save_file(written, file)


def load_safetensors(module: nn.Module, file: Path, upgrade: Upgrade | None = None) -> None:
    """Load every tensor of `file` into `module`. Arguments of the file and errors as of `read_safetensors`.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    load_tensors(module, read_safetensors(file, upgrade), file)


def read_safetensors(file: Path, upgrade: Upgrade | None = None) -> dict[str, Tensor]:
    """The tensors of a file that a training run exported.

    Args:
        file: a state dict.
        upgrade: from the tensors of a file, which an earlier version may have written, to those of this version.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a whole file.
        NotEnoughMemory: the file may be whole.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such weights; expected a folder that a training run exported")
    tensors = _load_safetensors(file)
    return tensors if upgrade is None else upgrade(tensors)


def _load_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with memory_to_read(file, 2 * file.stat().st_size), open(file, "rb"):  # safetensors maps it twice
            return load_file(file)  # it says of any file that cannot be opened that there is none: `open` says why
    except SafetensorError as error:  # which is no ValueError
        raise ValueError(f"{file}: not a whole safetensors file ({error}); copy it again") from None


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], file: Path, assign: bool = False) -> None:
    """Load every one of `tensors` into `module`.

    Args:
        module: the module to load into.
        tensors: its state dict.
        file: the file that they come from, for messages.
        assign: make them the module's own, instead of copying their values; for a module on the meta device.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    own = module.state_dict()
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{file} does not fit the model: {'; '.join(problems[:3])}{more}")
    module.load_state_dict(tensors, assign=assign)


def open_network(
    config: Path, build: Callable[[dict[str, Any]], Network], tensors: Mapping[str, Tensor], file: Path
) -> Network:
    """A new network with the weights that are stored beside its config. Errors as of `load_tensors`, and as of
    `recipes.models.config_files.build_from`.

    Args:
        config: JSON file.
        build: takes the object in it, and returns a network.
        tensors: the network's state dict, in any number format.
        file: the file that they come from, for messages.
    """
    try:
        with torch.device("meta"):  # no time, memory or random numbers for initial weights that are replaced
            network = build_from(config, build, tensors)
    except ValueError:  # such as of a constructor that reads values of tensors
        return _built_whole(config, build, tensors, file)
    own = network.state_dict()
    tensors = {name: tensor.to(own.get(name, tensor).dtype).contiguous() for name, tensor in tensors.items()}
    load_tensors(network, tensors, file, assign=True)
    if any(_is_on_meta(value) for module in network.modules() for value in _tensors_of(module)):
        return _built_whole(config, build, tensors, file)  # such as tables, which are no part of its state dict
    return network


def _built_whole(
    config: Path, build: Callable[[dict[str, Any]], Network], tensors: Mapping[str, Tensor], file: Path
) -> Network:
    """As `open_network`, with all that the network's constructor makes, and initial weights that are replaced."""
    with torch.random.fork_rng(devices=[]):
        network = build_from(config, build, tensors)
    load_tensors(network, tensors, file)
    return network


def _tensors_of(module: nn.Module) -> Iterator[Any]:
    """Values of a module, and those in its dicts, such as its buffers, and lists."""
    for value in vars(module).values():
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


DIFFUSERS = "diffusion_pytorch_model"
# Fields of a diffusers config that change nothing of what a network computes from given weights.
FREE = ("sample_size", "dropout", "force_upcast", "upcast_attention", "scaling_factor", "shift_factor")
# Layers of autoencoders' attention by the names of earlier versions, which Stable Diffusion's published files have.
EARLIER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
EARLIER_NAME = re.compile(rf"(.*mid_block\.attentions\.\d+)\.({'|'.join(EARLIER)})\.(weight|bias)")


def load_diffusers(module: Any, folder: Path, part: str | None = None) -> None:
    """Load a folder that diffusers' `save_pretrained` wrote, of one network or of a whole pipeline.

    Weights in 16 bits, in several files, and with the names of earlier versions are read too. What shapes do not show,
    such as the number of attention heads, is compared by the configs.

    Args:
        module: a network of diffusers.
        folder: of the network, or of the pipeline.
        part: the network's folder in a pipeline.

    Raises:
        FileNotFoundError: no weights in safetensors.
        ValueError: a tensor is missing, unknown, or of another shape; a config of another network.
    """
    if part is not None and (folder / part / "config.json").is_file():
        folder = folder / part
    tensors, file = _read_diffusers(folder)
    load_tensors(module, tensors, file)
    config = {name: own for name, own in module.config.items() if not name.startswith("_") and name not in FREE}
    check_config(config, folder / "config.json")


def check_config(config: Mapping[str, Any], file: Path, saved: Mapping[str, Any] | None = None) -> None:
    """Compare what describes a network with the file beside weights that it loads, as far as both have a value.

    Shapes do not show all, such as the number of attention heads.

    Args:
        config: of the network.
        file: JSON.
        saved: the part of the file that describes the network; None: all of it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the weights are those of another network.
    """
    saved = read_object(file) if saved is None else saved
    for name, own in config.items():
        if name in saved and not _same(own, saved[name]):
            raise ValueError(f"{file}: {name} is {saved[name]}, the recipe's network has {_plain(own)}")


def open_diffusers(kind: type[Network], folder: Path) -> Network:
    """A new network of diffusers in evaluation mode, from what its `save_pretrained` wrote. Errors as of
    `load_diffusers`, and as of `recipes.models.config_files.build_from`."""
    tensors, file = _read_diffusers(folder)
    return open_network(folder / "config.json", kind.from_config, tensors, file).eval()


def _read_diffusers(folder: Path) -> tuple[dict[str, Tensor], Path]:
    whole, index = folder / f"{DIFFUSERS}.safetensors", folder / f"{DIFFUSERS}.safetensors.index.json"
    if index.is_file() and not whole.is_file():
        parts = read_object(index).get("weight_map")
        if not (parts and isinstance(parts, dict)) or not all(isinstance(name, str) for name in parts.values()):
            raise ValueError(f"{index}: no `weight_map` from tensors to files; copy the folder again")
        names = sorted(set(parts.values()))
        files = [folder / Path(name).name for name in names]
    else:
        files = [next((f for f in (whole, folder / f"{DIFFUSERS}.fp16.safetensors") if f.is_file()), whole)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        pickled = " (a .bin file is a pickle, which is never read)" if (folder / f"{DIFFUSERS}.bin").is_file() else ""
        raise FileNotFoundError(
            f"{missing[0]}: no such weights{pickled}; expected a folder that diffusers or a training run wrote"
        )
    found = {_name_today(name): tensor for file in files for name, tensor in _load_safetensors(file).items()}
    return found, files[0]


def _name_today(name: str) -> str:
    """The name of a tensor of a diffusers file in the present version of diffusers."""
    match = EARLIER_NAME.fullmatch(name)
    return f"{match[1]}.{EARLIER[match[2]]}.{match[3]}" if match else name


def _same(one: Any, other: Any) -> bool:
    """Whether two values of configs mean the same; one value may stand for all levels."""
    one, other = _plain(one), _plain(other)
    if isinstance(one, list) != isinstance(other, list):
        values, single = (one, other) if isinstance(one, list) else (other, one)
        return all(value == single for value in values)
    return one == other


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch file that holds a state dict, directly or as `state_dict`.

    Raises:
        ValueError: a damaged file, or a PyTorch file that holds anything else, or tensors that are larger than the
            file. No code in it is run.
        NotEnoughMemory: the file may be whole.
    """
    if file.suffix == ".safetensors":
        return _load_safetensors(file)
    try:
        values = torch_files.load(file)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: holds more than tensors; save its state_dict() instead") from error
    except (FileNotFoundError, NotEnoughMemory):
        raise
    except Exception as error:  # on damaged bytes, PyTorch's reader raises nearly anything
        raise ValueError(f"{file}: not a file of tensors ({first_line(error)}); copy it again") from error
    if isinstance(values, dict) and isinstance(values.get("state_dict"), dict):
        values = values["state_dict"]
    if not isinstance(values, dict) or not all(_is_dense(value) for value in values.values()):
        raise ValueError(f"{file}: holds no tensors by name; save a state_dict()")
    return dict(values)


def _is_dense(value: Any) -> bool:
    """Whether a value is a tensor with its values in memory, and not a sparse, quantised or meta one."""
    strided = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return strided and not (value.is_nested or value.is_quantized)
