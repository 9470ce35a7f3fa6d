"""Finding an exported run and opening it for sampling, whatever family its model is of."""

from __future__ import annotations

import functools
import importlib
import shlex
import typing
from pathlib import Path
from typing import Any, Literal

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from data.system.garbage_collection import rare_searches
from recipes.config.build import encoders_of, import_builder, imported
from recipes.config.entry_points import all_components
from recipes.config.schema import missing_package
from recipes.config.values import Component
from recipes.models.family import ExportParts, Family
from recipes.models.json_files import read_object

Weights = Literal["ema", "raw"]
MADE = "the FOLDER that `python recipes/export.py {} FOLDER --layout native` makes"
MODELS = Path(__file__).resolve().parents[1] / "models"
LEAST = {"batches": 0, "samples": 0, "resolution": 1, "images": 0}  # of whole numbers in export.json


@functools.cache
def families() -> dict[str, Family]:
    """The families of models that generate images, by the name of their package in `recipes/models`."""
    names = sorted(file.parent.name for file in MODELS.glob("*/family.py"))
    return {name: importlib.import_module(f"recipes.models.{name}.family").FAMILY for name in names}


def find_export(path: Path) -> Path:
    """The export folder that `path` is, or that lies in it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: `path` is a file, which would have to be unpickled, or a pipeline of diffusers; the export's family
            is unknown, or its model generates no images.
    """
    if path.is_file():
        export = path.parent.parent / "export"
        raise ValueError(
            f"{path} is a file; a Composer checkpoint can run code when it is read, so only export folders are: give "
            + (f"{export}, which the export callback wrote" if export.is_dir() else MADE.format(shlex.quote(str(path))))
        )
    if (path / "model_index.json").is_file():
        raise ValueError(f"{path}: a pipeline of diffusers, which opens it; give the folder of the run or its export")
    titles = " or ".join(f"{family.title} model" for family in families().values())
    for folder in (path, path / "export"):
        if _identify(folder) is not None:
            return folder
        if (folder / "export.json").is_file():
            raise ValueError(f"{folder}: its model generates no images from captions; give the export of a {titles}")
    raise FileNotFoundError(
        f"{path}: no exported run of a {titles}; give runs/<run_name>/export, or "
        + MADE.format("CHECKPOINT")
    )


def family_of(export: Path) -> Family | None:
    """The family of the model in an export folder; None: it generates no images, and `find_export` refuses it."""
    found = _identify(export)
    return None if found is None else families()[found[0]]


def _identify(folder: Path) -> tuple[str, str] | None:
    """Name of the family and of the network's folder, by export.json; in older exports by the folders.

    None if it is not an export of a model that generates images.
    """
    record = read_record(folder) if (folder / "export.json").is_file() else {}
    if "family" in record:
        name, network = record["family"], record.get("network")
        if not isinstance(name, str) or name not in families():
            known = ", ".join(families())
            raise ValueError(f"{folder / 'export.json'}: unknown family {name!r}; this version knows {known}")
        if not isinstance(network, str) or Path(network).name != network or network in ("", ".."):
            raise ValueError(f"{folder / 'export.json'}: network {network!r} is not the name of a folder")
        return name, network
    for name, family in families().items():
        for network in family.networks:
            # A language model's folder has the same name, but nothing to make images with.
            if (folder / network / "config.json").is_file() and (folder / MANIFEST).is_file():
                read_record(folder)  # which has to be there: by its folders, a diffusion transformer is a token model
                return name, network
    return None


def read_record(export: Path, *needed: str) -> dict[str, Any]:
    """The contents of export.json, which need not be trusted.

    Args:
        export: the folder.
        needed: names of entries that must be there.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object, lacks an entry, or has something else than a whole number.
    """
    file = export / "export.json"
    record = read_object(file)
    for name in needed:
        if name not in record:
            raise ValueError(f"{file}: {name!r} is missing; export the run again")
    for name, least in LEAST.items():
        if type(value := record.get(name, least)) is not int or value < least:
            raise ValueError(f"{file}: {name} is {value!r:.60}, not a whole number of {least} or more")
    return record


def find_network(export: Path, weights: Weights | None) -> Path:
    """The folder of the trained network in an export.

    Args:
        export: as `find_export` gives it.
        weights: averaged or as trained; None: averaged if there are any.

    Raises:
        FileNotFoundError: the export does not have the weights that are requested.
    """
    raw = export / _identify(export)[1]
    averaged = raw.with_name(f"{raw.name}_ema")
    there = averaged.is_dir()  # also where a file in it is missing, of which whoever opens it says so
    if not there and holds_average(export):
        if weights == "raw":
            raise FileNotFoundError(f"--weights raw: {export} holds the averaged weights only; use ema")
        return raw
    if weights == "ema" and not there:
        raise FileNotFoundError(f"--weights ema: {averaged} does not exist, this export has no average; use raw")
    return averaged if there and weights != "raw" else raw


def weights_of(export: Path, network: Path) -> Literal["averaged", "as trained"]:
    """Which weights a network's folder in an export has.

    Args:
        export: as `find_export` gives it.
        network: as `find_network` gives it.
    """
    return "averaged" if network.name.endswith("_ema") or holds_average(export) else "as trained"


def holds_average(export: Path) -> bool:
    """Whether the network's own folder has averaged weights, as `recipes/export.py` writes it, by export.json."""
    return (export / "export.json").is_file() and read_record(export).get("weights") == "averaged"


def component_class(group: str, name: str) -> type:
    """The class of the objects that a component's builder makes: the builder itself, or the type that it returns.

    Raises:
        ValueError: no such component, or see `import_builder`.
    """
    builders = all_components()[group]
    if not isinstance(name, str) or name not in builders:
        known = ", ".join(builders)
        raise ValueError(f"unknown {group} {name!r}; {missing_package(name)}this version knows {known}")
    builder = import_builder(Component(group, name, {}, builders[name], group))
    return builder if isinstance(builder, type) else typing.get_type_hints(builder)["return"]


@rare_searches()  # it imports what the pipeline needs
def load_pipeline(
    folder: Path, device: Literal["auto", "cpu", "gpu"], precision: str, weights: Weights | None = None
) -> Any:
    """Everything of an export folder; reads JSON, NumPy arrays and safetensors only.

    Args:
        folder: as `find_export` gives it.
        device: auto: a GPU if there is one.
        precision: of the trained network: fp32, bf16 or fp16.
        weights: as `find_network` takes them.

    Returns:
        The pipeline of the model's family, such as `recipes.models.latent_diffusion.pipeline.DiffusionPipeline`.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: a GPU is requested and there is none, or an encoder is not the one that encoded the training data.
    """
    return imported(family_of(folder).pipeline)(open_parts(folder, device, precision, weights))


def draw(folder: str | Path, captions: list[str], *, weights: Weights | None = None, **options: Any) -> Any:
    """Images of captions by an export, (N, H, W, 3) uint8: `generate.py` as a function, on a GPU if there is one.

    Args:
        folder: an export, or a run's folder.
        captions: N.
        weights: averaged or as trained; None: averaged if there are any.
        options: of `generate` of the family's pipeline: `seeds` (N), `guidance`, `batch`, and its own ones.
    """
    from recipes.models.sampling import check_images

    images = load_pipeline(find_export(Path(folder)), "auto", "fp32", weights).generate(captions, **options)
    return check_images(images, len(captions))


def open_parts(
    folder: Path, device: Literal["auto", "cpu", "gpu"], precision: str, weights: Weights | None = None
) -> ExportParts:
    """What a family makes its pipeline of. Arguments and errors as of `load_pipeline`."""
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("--device gpu: PyTorch sees no GPU; use auto or cpu")
    manifest = Manifest.read(folder)
    image_encoder, text_encoder = encoders_of(manifest, folder)
    return ExportParts(
        folder=folder,
        record=read_record(folder, "resolution"),
        network=find_network(folder, weights),
        manifest=manifest,
        image_encoder=image_encoder,
        text_encoder=text_encoder,
        component_class=component_class,
        device="cuda" if device != "cpu" and torch.cuda.is_available() else "cpu",
        precision=precision,
    )
