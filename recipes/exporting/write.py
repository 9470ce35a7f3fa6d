"""From a checkpoint, or an export of a run, to a folder for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from data.encoded.manifest import NAME as MANIFEST
from data.system.disk_errors import about
from data.system.files import atomic_folder, write_text
from data.system.log import log
from recipes.config.build import imported
from recipes.exporting.card import model_card
from recipes.exporting.checkpoints import find_checkpoint
from recipes.exporting.native import from_checkpoint, from_export
from recipes.exports.encoder_files import ENCODERS
from recipes.generation.exports import Weights, family_of, find_export, open_parts
from recipes.models.family import Family, NotInDiffusersError

Layout = Literal["diffusers", "native"]
CARD = "README.md"


def write_export(
    source: Path,
    out: Path,
    *,
    weights: Weights | None = None,
    layout: Layout | None = None,
    recipe_file: Path | None = None,
    data: Path | None = None,
) -> Layout:
    """Write a checkpoint or an export as a folder that other programs open. Nothing is trained or unpickled.

    Args:
        source: a checkpoint, a run's folder, or an export of a run.
        out: folder to write; an earlier export in it is replaced.
        weights: averaged or as trained; None: averaged if there are any.
        layout: diffusers, or native, the layout of the `export` callback; None: diffusers where it has the model.
        recipe_file, data: see `from_checkpoint`.

    Returns:
        The layout that was written.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: a checkpoint of another recipe; a model that the layout does not have; a folder of something else,
            or one inside of the export.
    """
    check_folder(out)
    out = out.resolve()  # "." has no name, and a link would be replaced
    checkpoint = find_checkpoint(source)
    found = find_export(source) if checkpoint is None else None
    if found is not None and found.resolve() in (out, *out.parents):
        where = "is" if found.resolve() == out else "inside of"
        raise ValueError(f"{out}: {where} the export {found}; give a folder beside it")
    with about(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out) as new:
        native = new / ".native"  # within it, so that the next export removes both if this one is killed
        if checkpoint is None:
            from_export(found, native, weights)
        else:
            from_checkpoint(checkpoint, native, weights, recipe_file, data)
        family = family_of(native)
        layout = write_layout(native, new, layout, family)
        card = model_card(native, layout, out.name, family.guidance if family else None)
        if layout == "native":
            for part in native.iterdir():
                part.rename(new / part.name)
        shutil.rmtree(native)
        write_text(new / CARD, card)
    return layout


def check_folder(out: Path) -> None:
    """
    Raises:
        ValueError: there is something at `out` that is not an export.
    """
    known = any((out / name).is_file() for name in ("model_index.json", "export.json"))
    if out.exists() and not known and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an export; give a new folder, or delete it first")


def write_layout(native: Path, new: Path, layout: Layout | None, family: Family | None) -> Layout:
    """Fill `new` if the layout is diffusers'; returns the layout.

    Raises:
        ValueError: diffusers has no such model.
    """
    if family is None or family.diffusers is None or layout == "native":
        if layout == "diffusers":
            title = "models of this kind" if family is None else f"{family.title} models"
            raise ValueError(f"--layout diffusers: diffusers has no pipeline for {title}; use native")
        return "native"
    try:
        parts = open_parts(native, "cpu", "fp32")
        for name in ENCODERS:  # errors name them by their places, not by copies in a folder that is gone by then
            getattr(parts, name).id = getattr(parts.manifest, name)["id"]
        imported(family.diffusers)(parts, new)
    except NotInDiffusersError as error:
        if layout == "diffusers":
            raise ValueError(f"--layout diffusers: {error}; use native") from None
        log.info(f"export: {error}; it is written in the native layout")
        return "native"
    shutil.copyfile(native / MANIFEST, new / MANIFEST)
    return "diffusers"
