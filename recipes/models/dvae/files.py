"""The files of a dVAE: this repository's exports, and the public layouts of its tensors.

Nothing is unpickled but tensors. The layouts:

- release: encoder.safetensors and decoder.safetensors, or encoder.pt and decoder.pt, with names such as
  `blocks.group_1.block_1.res_path.conv_1.w`. Exports have it too, with the sizes in config.json.
- OpenMMLab: dalle_encoder.pth, the encoder alone with the same names, directly or under `state_dict`.
- FLAVA's codebook in Transformers: model.safetensors or pytorch_model.bin, the encoder alone with names such as
  `blocks.group_1.group.block_1.res_path.path.conv_1.weight`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.models.config_files import build_from
from recipes.models.dvae.network import DVAE
from recipes.models.weights import load_tensors, read_tensors, save_safetensors

KIND = "dvae"
CONFIG = "config.json"
FILES = {
    "encoder": ("encoder.safetensors", "encoder.pt", "dalle_encoder.pth", "model.safetensors", "pytorch_model.bin"),
    "decoder": ("decoder.safetensors", "decoder.pt"),
}
FLAVA = ("model.safetensors", "pytorch_model.bin")
PartTensors = dict[str, tuple[Path, dict[str, Tensor]]]  # encoder and decoder: the file, and its tensors


def save_dvae(network: DVAE, folder: Path) -> None:
    """Write config.json (the sizes), encoder.safetensors and decoder.safetensors, with the public release's names."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("encoder", "decoder"):
        save_safetensors(getattr(network, part).state_dict(), folder / f"{part}.safetensors")
    (folder / CONFIG).write_text(json.dumps({"kind": KIND, **network.sizes}, indent=2), encoding="utf-8")


def load_dvae(folder: Path) -> DVAE:
    """Open a folder that `save_dvae` wrote, or one in a public layout, with or without a decoder.

    A folder without a decoder gives a network whose `decoder` is None. The published encoder.pkl and decoder.pkl are
    pickled programs, which are not opened here. docs/dalle.md describes how to extract the tensors from them.

    Raises:
        FileNotFoundError: no file of an encoder.
        ValueError: the tensors are not those of a dVAE.
    """
    parts = _read(folder)
    with torch.device("meta"):  # no time, memory or random numbers for initial weights that are replaced
        network = _network(folder, parts)
    network.to_empty(device="cpu")
    _fill(network, parts)
    return network.eval()


def load_dvae_into(network: DVAE, folder: Path) -> None:
    """Load the weights of such a folder, which has a decoder, into a network of the same sizes. Raises as `load_dvae`.

    Raises:
        FileNotFoundError: also if there is no file of a decoder.
    """
    parts = _read(folder)
    if "decoder" not in parts:
        raise FileNotFoundError(_missing(folder, "decoder"))
    _fill(network, parts)


def _fill(network: DVAE, parts: PartTensors) -> None:
    for part, (file, tensors) in parts.items():
        load_tensors(getattr(network, part), tensors, file)


def _read(folder: Path) -> PartTensors:
    """The parts that there are.

    Raises:
        FileNotFoundError: no encoder, or a decoder that is a pickled program.
    """
    parts = {}
    for part, names in FILES.items():
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is not None:
            tensors = read_tensors(file)
            parts[part] = file, _release_names(tensors) if file.name in FLAVA else tensors
        elif part == "encoder" or (folder / f"{part}.pkl").is_file():
            raise FileNotFoundError(_missing(folder, part))
    return parts


def _missing(folder: Path, part: str) -> str:
    pickled = (folder / f"{part}.pkl").is_file()
    hint = f"; {part}.pkl is a pickled program: docs/dalle.md says how to convert it" if pickled else ""
    return f"{folder}: no {' and no '.join(FILES[part])} of a dVAE{hint}"


def _release_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of FLAVA's codebook under the names of the public release."""

    def release(name: str) -> str:
        name = name.replace(".group.", ".").replace(".res_path.path.", ".res_path.")
        return name.removesuffix("weight") + "w" if name.endswith(".weight") else name.removesuffix("bias") + "b"

    return {release(name): tensor for name, tensor in tensors.items()}


def _network(folder: Path, parts: PartTensors) -> DVAE:
    """A network of the sizes in the config.json of an export, otherwise of those of the tensors."""
    file, encoder = parts["encoder"]
    if not (folder / CONFIG).is_file() or file.name in FLAVA:  # whose config.json is of another kind
        return DVAE(**_sizes(folder, parts))

    def build(values: dict[str, Any]) -> DVAE:
        sizes = _sizes_of_config(values, folder / CONFIG)
        return DVAE(**(sizes if "decoder" in parts else {**sizes, "initial": None}))

    tensors = {f"{part}.{name}": tensor for part, (_, own) in parts.items() for name, tensor in own.items()}
    return build_from(folder / CONFIG, build, tensors)


def _sizes(folder: Path, parts: PartTensors) -> dict[str, int | None]:
    """The sizes of the tensors."""
    encoder = parts["encoder"][1]
    try:
        hidden, colours = encoder["blocks.input.w"].shape[:2]
        codes, initial = len(encoder["blocks.output.conv.w"]), None
        if "decoder" in parts:
            initial, codes = parts["decoder"][1]["blocks.input.w"].shape[:2]
    except (KeyError, ValueError, TypeError):
        raise ValueError(
            f"{folder}: the tensors are not those of a dVAE: no blocks.input.w and blocks.output.conv.w"
        ) from None
    if colours != 3:
        raise ValueError(f"{folder}: encoder and decoder are swapped, or the images have {colours} channels")
    blocks = sum(name.startswith("blocks.group_1.") and name.endswith(".res_path.conv_1.w") for name in encoder)
    return {"codes": codes, "hidden": hidden, "blocks": blocks, "initial": initial}


def _sizes_of_config(values: dict[str, Any], file: Path) -> dict[str, int]:
    if values.get("kind") != KIND:
        raise ValueError(f'{file}: is not that of a dVAE, whose "kind" is "{KIND}"')
    sizes = {name: values.get(name) for name in ("codes", "hidden", "blocks", "initial")}
    if not all(type(size) is int for size in sizes.values()):
        raise ValueError(f"{file}: expected whole numbers for {', '.join(sizes)}, got {sizes}")
    return sizes
