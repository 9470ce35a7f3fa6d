"""Checks of a recipe against its data and this machine's disks, before anything is trained."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.cost import size_text
from recipes.checking.encoded_sets import caches, encoders, fetch_indexes, hashes, shards
from recipes.checking.finding import Finding
from recipes.config.recipe import Recipe
from recipes.planning.inputs import local_manifests

if TYPE_CHECKING:
    from recipes.planning.dry_run import Survey


def cheap_recipe_checks(recipe: Recipe) -> Iterator[Finding]:
    """What every run is checked for when it starts: milliseconds, without torch."""
    yield from encoders(local_manifests(recipe))
    yield from caches(recipe)
    yield from hashes(recipe)
    yield from shards(recipe)
    # A checkpoint is as large as the last one; before the first one only the doctor, who builds the model, knows. One
    # rank looks: a sharded checkpoint has a file of each rank, and so many ranks would ask a file system for all.
    first = os.environ.get("RANK", "0") == "0"
    if first and recipe.checkpoints.save and (held := held_checkpoints(recipe)):
        found = disk(Path(recipe.output), max(held))
        # No more than a warning: a run that has ended writes nothing, and what a killed one left is removed first.
        yield dataclasses.replace(found, level="warning") if found.level == "error" else found


def recipe_checks(
    recipe: Recipe, missing: list[str], whole: Callable[[Recipe], Any] | None = None
) -> Iterator[Finding]:
    """All checks of a recipe. The model is built without memory for weights, which takes seconds, and the indexes of
    remote sets are fetched.

    Args:
        recipe: checked for its keys and values.
        missing: input paths that do not exist, one line each.
        whole: see `recipes.planning.dry_run.problems`; None: `survey`.
    """
    from recipes.checking.attention_kernels import attentions
    from recipes.planning.dry_run import disk_bytes, problems, survey
    from recipes.planning.inputs import absent_inputs

    yield from fetch_indexes(recipe)
    try:
        missing = absent_inputs(recipe, missing)
    except ValueError as error:
        yield Finding("error", "input", str(error))
    yield from (Finding("error", "input", f"not there: {path}") for path in missing)
    yield from (finding for finding in cheap_recipe_checks(recipe) if finding.subject != "disk")
    wrong = list(problems(recipe, whole or survey))
    yield from (Finding("error", "recipe", text) for text in wrong)
    if wrong:
        return
    found = survey(recipe)
    yield Finding("ok", "recipe", "model, batch, data and options fit each other")
    yield from attentions(recipe, found.task)
    yield disk(Path(recipe.output), disk_bytes(recipe, found) - sum(held_checkpoints(recipe)) - held_exports(found))


def held_checkpoints(recipe: Recipe) -> list[int]:
    """The sizes in bytes of the checkpoints that lie in the run's folder, of those that it keeps the newest.

    A run whose launcher has ended may still be there, and remove a checkpoint that has been found.
    """
    times = {}
    for path in Path(recipe.output, "checkpoints").glob("ep*-ba*"):
        with suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    paths = sorted(times, key=times.__getitem__)
    keep = len(paths) if recipe.checkpoints.keep == -1 else recipe.checkpoints.keep
    return [_size(path) for path in paths[-keep:]]


def held_exports(found: Survey) -> int:
    """Bytes of the exports that lie in the run's folder, each of which the next one replaces."""
    files = [cost.files for cost in found.costs.callbacks.values() if cost.files is not None and cost.files.held]
    return sum(min(each.held, _size(Path(each.folder))) for each in files)


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder, as far as they are still there."""
    total = 0
    with suppress(FileNotFoundError):
        for file in [path, *path.rglob("*")]:
            total += file.stat().st_size if file.is_file() else 0
    return total


def disk(output: Path, needed: int) -> Finding:
    """Whether the folder of a run can be written, and its checkpoints and exports fit on the disk.

    Args:
        output: folder of the run, which need not exist.
        needed: bytes that the run will write there and keep at the same time, besides those that lie there.
    """
    folder = output.absolute()
    while not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("error", "disk", f"nothing can be written into {folder} for {output}: set `output`")
    left = shutil.disk_usage(folder).free
    if left < needed:
        return Finding(
            "error",
            "disk",
            f"{size_text(left)} free for {output}, and the run's checkpoints and exports take {size_text(needed)}: "
            "lower checkpoints.keep, or set `output`",
        )
    return Finding("ok", "disk", f"{size_text(max(0, needed))} for checkpoints and exports, {size_text(left)} free")
