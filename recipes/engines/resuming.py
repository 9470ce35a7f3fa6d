"""What a start does with the folder of its run before anything is built: it mends it, and finds out whether it may go
on from what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from data.remote.stores import scheme_of
from data.system.files import move
from data.system.log import log
from recipes.config.recipe import Checkpoints, Recipe
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.fetched import fetch_newest
from recipes.engines.checkpoints.files import OLD, PARTIAL, remove
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint
from recipes.engines.checkpoints.same_model import Saved, saved_at
from recipes.engines.checkpoints.sharded_files import METADATA
from recipes.engines.record import RECORDS, check_copy, check_record, keep_with
from recipes.engines.shared_folder import check_shared
from recipes.training.checkpoint_names import KINDS, Kind, batch_of, check_engine, conversion, newest_of_all
from recipes.training.ranks import by_first_rank

# What `data.system.files` writes before it renames: the name, often the machine, and the process.
HALF = re.compile(r"\..+\.\d+")
# The same in folders where users may have files of their own.
HALF_DRAWN = re.compile(r"\..+\.(db|json|png|txt|yaml)\..+\.\d+(-journal)?")


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
        ValueError: the run must not go on, the bucket does not answer, or machines do not share the folder.
    """
    # The other ranks may see an older state of a shared folder, or one that the first rank is changing.
    changed = by_first_rank(lambda: _prepare(recipe, engine))
    if recipe.checkpoints.save:
        check_shared(Path(recipe.output))
    return changed


def _prepare(recipe: Recipe, engine: str) -> list[str]:
    """The part of `prepare_folder` that the first rank does; returns the changed keys."""
    output, checkpoints = Path(recipe.output), recipe.checkpoints
    remove_halves(output)
    bucket = None if checkpoints.bucket is None else Bucket(checkpoints.bucket)
    if bucket is not None:
        bucket.check_writable(checkpoints.keep)  # now, and not when the first checkpoint is copied
    if not checkpoints.resumes:
        if bucket is not None and (latest := bucket.latest()) is not None:
            raise ValueError(
                f"checkpoints.bucket: {bucket.address} has {latest['checkpoint']} of an earlier run, and "
                "checkpoints.autoresume: false would replace it; give another address, or remove what is there"
            )
        return []
    kind, folder = KINDS[engine], output / "checkpoints"
    if bucket is not None:
        newest = newest_of_all(folder)
        if newest is not None and batch_of(newest.name) is None:
            raise ValueError(
                f"checkpoints.bucket: cannot tell whether its copy is newer than {newest}, whose name does not begin "
                f"with an epoch and a batch; rename it, for instance to {kind.name_of(0, 1000, newest.is_dir())}"
            )
        fetch_newest(bucket, output, lambda texts: check_copy(recipe, texts))
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
        ValueError: the other engine wrote the newest one, or with another recipe; the folder is a file.
    """
    output = Path(recipe.output).absolute()
    above = next(folder for folder in (output, *output.parents) if folder.exists())
    if not above.is_dir():
        raise ValueError(f"output: {above} is a file, and the run would write into a folder there; give another folder")
    if recipe.checkpoints.resumes and recipe.checkpoints.bucket is None:
        check_engine(Path(recipe.output) / "checkpoints", engine)
        check_record(recipe)


def start_of(recipe: Recipe, engine: str, load_path: str | None) -> Path | None:
    """The checkpoint on a disk that a run goes on from; None: there is none, or it is to be fetched.

    Args:
        recipe: of the run.
        engine: that runs it.
        load_path: `checkpoints.load_path`, or where it has been fetched to.

    Raises:
        FileNotFoundError: `load_path` does not exist, and the run's bucket has no checkpoint.
        ValueError: `load_path` is a folder that holds checkpoints, or an export.
    """
    newest = KINDS[engine].newest(Path(recipe.output, "checkpoints")) if recipe.checkpoints.resumes else None
    if newest is not None or not load_path or scheme_of(load_path):
        return newest
    path = Path(load_path).resolve()
    inner = newest_of_all(path) or newest_of_all(path / "checkpoints")
    if inner is not None:
        raise ValueError(f"checkpoints.load_path: {path} is a folder of checkpoints; name one of them, such as {inner}")
    if (path / "export.json").is_file():
        raise ValueError(
            f"checkpoints.load_path: {path} is an export, which has weights alone; give it as checkpoints.load_weights"
        )
    bucket = recipe.checkpoints.bucket
    if bucket is not None and not path.exists():  # no error of the config, as the bucket might have had a checkpoint
        raise FileNotFoundError(
            f"checkpoints.load_path: `{path}` does not exist, and {bucket} has no checkpoint to go on from"
        )
    return path


def check_form(recipe: Recipe, start: Path) -> None:
    """Whether the engine can load a checkpoint in its form.

    Raises:
        ValueError: it is a sharded one, the run does not shard, and its engine is Composer.
    """
    sharded = (start / METADATA).is_file()  # without it, another message says what the folder lacks
    if sharded and recipe.training.fsdp is None and recipe.training.engine == "composer":
        raise ValueError(
            f"{start}: Composer loads a sharded checkpoint only into a run with training.fsdp; make it a full one with "
            f"{conversion(start, 'composer')}{'' if recipe.goes_on() else ', and give checkpoints.load_path that one'}"
        )


def check_start(recipe: Recipe, task: nn.Module, optimizer: str) -> None:
    """Whether the checkpoint that a run goes on from is one of its model and optimizer, as the run will find out. A
    bucket is not asked.

    Args:
        recipe: of the run.
        task: its model, on any device.
        optimizer: class of its optimizer.

    Raises:
        FileNotFoundError, ValueError: it is not, or cannot be loaded.
    """
    checkpoints, engine = recipe.checkpoints, recipe.training.engine
    start = None if checkpoints.bucket is not None else start_of(recipe, engine, checkpoints.load_path)
    if start is not None and start.exists():  # a path that does not is named as a missing one
        check_form(recipe, start)
        saved_for(recipe, engine, start).check(task, optimizer)


def saved_for(recipe: Recipe, engine: str, start: Path) -> Saved:
    """What the checkpoint is of that a run goes on from. Raises as `saved_at` and as `says_what_to_remove`."""
    with says_what_to_remove(Path(recipe.output, "checkpoints"), KINDS[engine], recipe.checkpoints):
        return saved_at(start, engine)


def say_start(start: Path | str, batch: int) -> None:
    """Log where a run goes on, and if the name of the checkpoint says another batch: its folder may have a file of
    another checkpoint, whose weights would be trained with the data and the schedule of this one.

    Args:
        start: path or address of the checkpoint.
        batch: that its state says.
    """
    log.info(f"checkpoints: goes on from {start} at batch {batch}")
    named = batch_of(Path(start).name)
    if named not in (None, batch):
        log.warning(
            f"checkpoints: {start} is of batch {batch} by its contents and of {named} by its name; unless you renamed "
            "it, files of two checkpoints are mixed: stop the run, and copy the checkpoint again or remove it"
        )


def remove_halves(output: Path) -> None:
    """Remove what killed processes have left of checkpoints, of files that they fetched, and of pictures and records.

    Only the first rank calls this, before it writes anything.
    """
    for old in (output / "checkpoints").glob(f"{OLD}*"):
        if not (path := old.with_name(old.name.removeprefix(OLD))).exists():
            move(old, path)
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
        # A link may lead to another run's checkpoint, or to a folder of checkpoints, which stays.
        gone = newest if newest.parent in (folder, folder.resolve()) else folder / kind.link
        raise ValueError(f"{error}; remove {gone}, and the next start {goes_on}") from error
