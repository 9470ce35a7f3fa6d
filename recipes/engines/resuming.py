"""What a start does with the folder of its run before anything is built: it mends it, and finds out whether it may go
on from what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.config.recipe import Checkpoints, Recipe
from recipes.engines.bucket import Bucket
from recipes.engines.checkpoint_files import OLD, PARTIAL, remove
from recipes.engines.plain_pickles import DamagedCheckpoint
from recipes.engines.record import RECORDS, check_copy, check_record, keep_with
from recipes.training.kinds import KINDS, Kind, check_engine
from recipes.training.ranks import by_first_rank

# What `data.files` writes before it renames: the name, often the machine, and the process.
HALF = re.compile(r"\..+\.\d+")
# The same in folders where users may have files of their own.
HALF_DRAWN = re.compile(r"\..+\.(db|json|png|yaml)\..+\.\d+(-journal)?")


def prepare_folder(recipe: Recipe, engine: str) -> list[str]:
    """Make a run's folder what its start expects: without halves of files, with the newest checkpoint of
    `checkpoints.bucket`, and with one that this engine and this recipe may go on from. Every rank must call it.

    Args:
        recipe: of the run.
        engine: that runs it.

    Returns:
        The keys of the recipe that have changed since this checkpoint was written, all of which may; empty if the run
        begins.

    Raises:
        ValueError: the run must not go on, or the bucket does not answer.
    """
    # The other ranks may see an older state of a shared folder, or one that the first rank is changing.
    return by_first_rank(lambda: _prepare(recipe, engine))


def _prepare(recipe: Recipe, engine: str) -> list[str]:
    """The part of `prepare_folder` that the first rank does; returns the changed keys."""
    output, checkpoints = Path(recipe.output), recipe.checkpoints
    remove_halves(output)
    if not checkpoints.resumes:
        return []
    if checkpoints.bucket is not None:
        Bucket(checkpoints.bucket).pull(output, lambda texts: check_copy(recipe, texts))
    kind, folder = KINDS[engine], output / "checkpoints"
    kind.mend(folder)
    check_engine(folder, engine)
    newest = kind.newest(folder)
    if newest is not None:
        keep_with(output, newest, anew=False)
    return check_record(recipe)


def check_folder(recipe: Recipe, engine: str) -> None:
    """Whether a run may go on from the checkpoints in its folder, in which nothing is changed. A bucket, which may have
    a newer one, is not asked.

    Raises:
        ValueError: the other engine wrote the newest one, or with another recipe.
    """
    if recipe.checkpoints.resumes and recipe.checkpoints.bucket is None:
        check_engine(Path(recipe.output) / "checkpoints", engine)
        check_record(recipe)


def remove_halves(output: Path) -> None:
    """Remove what killed processes have left of checkpoints, of files that they fetched, and of pictures and records.

    Only the first rank calls this, before it writes anything.
    """
    for old in (output / "checkpoints").glob(f"{OLD}*"):
        if not (path := old.with_name(old.name.removeprefix(OLD))).exists():
            old.rename(path)
    for folder in ("checkpoints", "fetched", RECORDS):
        for path in (output / folder).glob(".*"):
            if path.name.startswith(PARTIAL) or HALF.fullmatch(path.name):
                remove(path)
    for path in (*output.glob(".*"), *output.glob("*/.*")):
        if HALF_DRAWN.fullmatch(path.name):
            remove(path)


@contextmanager
def says_what_to_remove(folder: Path, kind: Kind, config: Checkpoints) -> Iterator[None]:
    """A context for loading a run's checkpoint, in which a damaged one raises an error that says how to go back.

    A run that silently went back to an older checkpoint would lose work.

    Args:
        folder: of the run's checkpoints.
        kind: those of the engine.
        config: says whether this is the newest one of the folder.

    Raises:
        ValueError: the newest one is damaged; from which one the run can go on, and what must be removed for it.
    """
    try:
        yield
    except (DamagedCheckpoint, FileNotFoundError) as error:
        newest = kind.newest(folder) if config.resumes else None
        other_file = isinstance(error, FileNotFoundError) and newest is not None and newest.name not in str(error)
        if newest is None or other_file:  # then it is checkpoints.load_path, or no checkpoint
            raise
        older = [path for path in kind.all(folder) if path.name != newest.name]
        goes_on = f"goes on from {older[-1]}" if older else "begins anew"
        if config.bucket is not None:
            goes_on = f"fetches its copy from {config.bucket}, or with checkpoints.bucket=null {goes_on}"
        raise ValueError(f"{error}; remove {newest}, and the next start {goes_on}") from error
