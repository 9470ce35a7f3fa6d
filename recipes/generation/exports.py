"""Finding an exported run, of diffusion or of tokens, and opening it for sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from data.manifest import Manifest
from recipes.config.build import encoders_of

Weights = Literal["ema", "raw"]
Kind = Literal["diffusion", "tokens"]

# The folder of the trained network in an export, by kind of the model.
NETWORKS: dict[Kind, str] = {"diffusion": "unet", "tokens": "transformer"}


def find_export(path: Path) -> Path:
    """The export folder that `path` is, or that lies in it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: `path` is a file, which would have to be unpickled.
    """
    if path.is_file():
        raise ValueError(
            f"{path} is a file; a Composer checkpoint can run code when it is read, so only export folders are: "
            f"give {path.parent.parent / 'export'}, which the export callback writes"
        )
    for folder in (path, path / "export"):
        if any((folder / network / "config.json").is_file() for network in NETWORKS.values()):
            return folder
    files = " or ".join(f"{network}/config.json" for network in NETWORKS.values())
    raise FileNotFoundError(f"{path}: no exported run (a folder with {files}); give runs/<run_name>/export")


def kind_of(export: Path) -> Kind:
    """What kind of model an export folder holds."""
    return next(kind for kind, network in NETWORKS.items() if (export / network / "config.json").is_file())


def find_network(export: Path, weights: Weights | None) -> Path:
    """The folder of the trained network in an export.

    Args:
        export: as `find_export` gives it.
        weights: averaged or as trained; None: averaged where there are any.

    Raises:
        FileNotFoundError: averaged weights are asked for, and the run had no average.
    """
    raw = export / NETWORKS[kind_of(export)]
    averaged = raw.with_name(f"{raw.name}_ema")
    there = (averaged / "config.json").is_file()
    if weights == "ema" and not there:
        raise FileNotFoundError(f"--weights ema: {averaged} does not exist, the run had no average; use raw")
    return averaged if there and weights != "raw" else raw


def load_pipeline(
    folder: Path, device: Literal["auto", "cpu", "gpu"], precision: str, weights: Weights | None = None
) -> Any:
    """Everything of an export folder; reads JSON, NumPy arrays and safetensors only.

    Args:
        folder: as `find_export` gives it.
        device: auto: a GPU where there is one.
        precision: of the trained network: fp32, bf16 or fp16.
        weights: as `find_network` takes them.

    Returns:
        `recipes.models.latent_diffusion.pipeline.Pipeline` or `recipes.models.autoregressive.pipeline.Pipeline`.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: no GPU where one is asked for, an encoder other than the one that encoded the training data.
    """
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("--device gpu: PyTorch sees no GPU; use auto or cpu")
    place = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if kind_of(folder) == "tokens":
        from recipes.models.autoregressive.pipeline import load
    else:
        from recipes.models.latent_diffusion.pipeline import load
    manifest = Manifest.read(folder)
    return load(folder, find_network(folder, weights), manifest, encoders_of(manifest, folder), place, precision)
