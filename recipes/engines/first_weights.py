"""The model that a run starts with: new weights, or those of `checkpoints.load_weights`."""

from __future__ import annotations

import os
import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.system.files import read_if_object
from data.system.log import log
from recipes.config.build import build, build_on_meta
from recipes.config.recipe import Recipe
from recipes.models.task import Task
from recipes.planning.check_model import check_model
from recipes.training.ranks import by_first_rank


def new_task(recipe: Recipe, *, sent: bool, resumes: bool = False) -> Task:
    """The recipe's model on this rank. Ranks must have been seeded alike; afterwards their generators are alike again.

    Args:
        recipe: of the run.
        sent: build the whole model on the first rank only, and on the meta device on others, which receive their parts
            of the weights when it has been divided (`FirstRankSends`). Every rank must then call this.
        resumes: the run goes on from a checkpoint, which has all weights. `checkpoints.load_weights` is then not read:
            every rank would read the whole folder in vain.

    Raises:
        FileNotFoundError, ValueError: a model that cannot be sharded, or weights that do not load.
    """
    if not sent:
        return _whole_task(recipe, resumes)
    built: list[Task] = []

    def build_here() -> tuple[Any, ...]:
        built.append(_whole_task(recipe, resumes))
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    python, numpy, torchs = by_first_rank(build_here)  # which may take minutes
    task = built[0] if built else build_on_meta(recipe.model)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torchs)
    return task


def _whole_task(recipe: Recipe, resumes: bool) -> Task:
    task = build(recipe.model)
    check_model(recipe, task)
    if recipe.checkpoints.load_weights and not resumes:
        load_first_weights(recipe, task)
    return task


def load_first_weights(recipe: Recipe, task: Task) -> None:
    """Load them into a new task. On the meta device, only their names, shapes and configs are compared.

    Raises:
        FileNotFoundError, ValueError: see `Task.load_export`. Where the folder says that its weights are of another
            kind of model, the message does, too; where it is a run's folder, the message names its export.
    """
    folder, bucket = Path(recipe.checkpoints.load_weights), recipe.checkpoints.bucket
    if not folder.exists():  # which is no error of the config, as long as the bucket may have a checkpoint
        empty = "" if bucket is None else f", and {bucket} has no checkpoint to go on from"
        raise FileNotFoundError(f"checkpoints.load_weights: `{folder}` does not exist{empty}")
    if folder.is_file():  # such as a checkpoint, or a published file with the names of CompVis' code
        raise ValueError(
            f"checkpoints.load_weights: {folder} is a file; give the folder of an export or of diffusers, which opens "
            "single files with from_single_file and writes folders with save_pretrained"
        )
    try:
        task.load_export(folder)
    except (FileNotFoundError, ValueError) as error:
        if (folder / "export" / "done.json").is_file():
            where = f"checkpoints.load_weights: {folder} is the folder of a run"
            raise ValueError(f"{where}; give {folder}/export") from None
        theirs, own = _kind(folder), _named(recipe.model.name, task.export_record())
        if theirs is None or theirs == own or theirs in {type(module).__name__ for module in task.modules()}:
            raise
        raise ValueError(
            f"checkpoints.load_weights: {folder} holds the weights of {theirs}, and the recipe builds {own} ({error})"
        ) from error
    record = read_if_object(folder / "export.json")
    # Exports that recipes/export.py has written say which weights they hold, and are of any batch.
    if "batches" in record and "weights" not in record and not (folder / "done.json").is_file():
        log.warning(
            f"checkpoints.load_weights: {folder} is of batch {record['batches']} of a run that has not ended; this run "
            "begins with those weights"
        )
    if task.exports_average_beside and record.get("average"):
        log.info(
            f"checkpoints.load_weights: the weights as trained; {folder} also holds their average, which "
            f"`python recipes/export.py {shlex.quote(str(folder))} FOLDER` writes into a folder of its own"
        )


def started_from(recipe: Recipe, output: Path | None = None) -> str | None:
    """The name of the model whose weights a run starts with: that of its run, or else of its folder; None: new weights.

    It is published with the model, so it is not the path. If the folder has gone, an earlier export of the run says it.

    Args:
        recipe: of the run.
        output: the run's folder; None: as the recipe says.
    """
    if recipe.checkpoints.load_weights is None:
        return None
    if not os.path.exists(recipe.checkpoints.load_weights):
        known = read_if_object(Path(output or recipe.output, "export", "export.json")).get("started_from")
        if isinstance(known, str):
            return known
    folder = whole_of(Path(recipe.checkpoints.load_weights).absolute())
    named = folder.parent if folder.name == "export" else folder
    return read_if_object(folder / "export.json").get("run_name", named.name)


def whole_of(folder: Path) -> Path:
    """The export or pipeline of which a folder is the network; the folder itself where it is none."""
    alone = folder.name.removesuffix("_ema") in ("unet", "transformer") and not (folder / "export.json").is_file()
    return folder.parent if alone else folder


def _kind(folder: Path) -> str | None:
    """The model whose weights are in a folder: by the record of an export, or by the class that diffusers names."""
    record = read_if_object(folder / "export.json")
    if "family" in record:
        return _named(record["family"], record)
    # The network's own folder, or one of the pipelines that diffusers has.
    names = (read_if_object(folder / part / "config.json").get("_class_name") for part in ("", "unet", "transformer"))
    return next((name for name in names if isinstance(name, str)), None)


def _named(model: str, record: dict[str, Any]) -> str:
    return f"{model} with the denoiser {record['denoiser']}" if "denoiser" in record else model
