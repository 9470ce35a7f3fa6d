"""Builds Composer's Trainer for a recipe."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Evaluator, Event, State, Trainer
from composer.distributed import prepare_distributed
from composer.loggers import Logger
from composer.trainer import trainer as composer_trainer
from composer.utils import FSDP2Config, dist, reproducibility
from composer.utils import checkpoint as composer_checkpoint
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import is_tar
from torch.distributed.fsdp.wrap import CustomPolicy

from data.remote.stores import scheme_of
from data.system.log import log
from recipes.algorithms.resilience.token_ids import look_at
from recipes.config.recipe import Recipe
from recipes.config.values import plain_values
from recipes.engines.checkpoints.conversion import OF_COMPOSER
from recipes.engines.checkpoints.fetched import fetched
from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.checkpoints.further_names import loaded_under_each_name
from recipes.engines.checkpoints.lazy import copy_moments
from recipes.engines.checkpoints.legacy import upgraded
from recipes.engines.checkpoints.own_optimizers import is_own, steps_of_nothing
from recipes.engines.checkpoints.plain_pickles import load_plain, plain_pickles
from recipes.engines.checkpoints.same_model import saved_in
from recipes.engines.composer.adapters import RunLevers, as_algorithms, callbacks_of, run_callback
from recipes.engines.composer.checkpoints import EndIfAsked, SaveEarly, WholeCheckpoints
from recipes.engines.composer.data import data_spec
from recipes.engines.composer.generators import Generators
from recipes.engines.composer.intervals import CHECKPOINT, at_intervals
from recipes.engines.composer.load_planner import LoadPlanner, Sharded
from recipes.engines.composer.loggers import Destination
from recipes.engines.composer.model import ComposerTask
from recipes.engines.composer.run import ComposerRun, clock_of
from recipes.engines.counts import Counts, in_present_batches
from recipes.engines.data_parallel import data_parallel
from recipes.engines.generators import check_position
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.meeting import LIMIT, meeting
from recipes.engines.parts import Parts, Place, build_parts
from recipes.engines.record import keep_record
from recipes.engines.resuming import check_form, saved_for, say_start, says_what_to_remove, start_of
from recipes.planning.run_summary import opening
from recipes.training.callback import is_complete
from recipes.training.checkpoint_names import KINDS, has_checkpoints
from recipes.training.hooks import Hooks, by_names_of_states
from recipes.training.ranks import by_first_rank, from_first_rank


def train(recipe: Recipe) -> None:
    """Train a recipe to its end, from its newest checkpoint where it resumes.

    Raises:
        ValueError: batch sizes that do not divide, data that does not fit the model, weights that do not load.
    """
    trainer = build_trainer(recipe)
    clock = clock_of(trainer.state)
    if clock.ended:
        log.info(f"already trained to {recipe.training.duration}: {recipe.output}")
        if is_complete(callbacks_of(trainer.state), clock):
            finish(trainer)
        else:
            for event in (Event.FIT_START, Event.FIT_END):
                trainer.engine.run_event(event)
    else:
        trainer.fit()
    trainer.close()


def build_trainer(recipe: Recipe, change: Callable[[Parts], None] = lambda parts: None) -> Trainer:
    """Everything that a run needs, ready for `fit()`. Raises as `train`.

    Args:
        recipe: of the run.
        change: called with the run's parts before the engine takes them; measurements add callbacks of their own.
    """
    use_gpu = Place.of(recipe, 1).use_gpu
    if "GROUP_RANK" in os.environ:  # torchrun's name for what Composer calls NODE_RANK
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    with meeting():
        dist.initialize_dist("gpu" if use_gpu else "cpu", timeout=LIMIT)
    reproducibility.seed_all(recipe.seed)  # the same initial weights on every rank
    place = Place.of(recipe, dist.get_local_world_size())
    parts = build_parts(recipe, place, "composer")
    change(parts)
    if dist.get_global_rank() == 0:
        keep_record(recipe, parts.data)
    log.info(
        opening(recipe, parts.task, parts.data, parts.evals, world=dist.get_world_size(), precision=place.precision)
    )
    optimizer = parts.new_optimizer([p for p in parts.task.parameters() if p.requires_grad])
    with (
        says_what_to_remove(Path(recipe.output, "checkpoints"), KINDS["composer"], recipe.checkpoints),
        own_data_parallel(parts.levers.average),
        own_wrapping(),
        own_unpickling(parts.task, optimizer),
        loaded_under_each_name(),
        steps_of_nothing(),
    ):
        trainer = new_trainer(recipe, place, parts, optimizer)
    count_in_present_batches(trainer, recipe, parts)
    trainer.logger.log_hyperparameters({"recipe": plain_values(recipe)})
    return trainer


def finish(trainer: Trainer) -> None:
    """Wait for the copy of the last checkpoint, and tell the loggers that the run is finished, as `fit` at its end.

    Raises:
        ValueError: it could not be copied.
    """
    for kind in (WholeCheckpoints, Destination):
        for callback in trainer.state.callbacks:
            if isinstance(callback, kind):
                callback.fit_end(trainer.state, trainer.logger)


def count_in_present_batches(trainer: Trainer, recipe: Recipe, parts: Parts) -> None:
    """Count the batches of the present epoch in batches of the present size, where a checkpoint had others."""
    now = trainer.state.timestamp
    counts = in_present_batches(
        Counts(**{name: getattr(now, name).value for name in Counts.names()}),
        parts.data,
        global_batch=recipe.training.global_batch,
        ranks=dist.get_world_size() // parts.copies,
    )
    trainer.state.timestamp = now.copy(batch_in_epoch=counts.batch_in_epoch)


@contextmanager
def own_data_parallel(averaged: bool) -> Iterator[None]:
    """A context in which Composer's Trainer wraps models by `data_parallel`: its own function has no options."""
    theirs = composer_trainer.prepare_ddp_module
    composer_trainer.prepare_ddp_module = lambda module, find_unused_parameters: data_parallel(module, averaged)
    try:
        yield
    finally:
        composer_trainer.prepare_ddp_module = theirs


@contextmanager
def own_wrapping() -> Iterator[None]:
    """A context in which Composer's Trainer shards no module: the levers of the `training` section have done so.

    Composer's wrapping knows one number format for the whole model, and has no way to hand over a mesh. The attribute
    by which a model can refuse it, `_fsdp_wrap`, is deprecated, of which Composer would warn each user.
    """
    theirs = prepare_distributed.generate_composer_model_policy
    prepare_distributed.generate_composer_model_policy = lambda model: CustomPolicy(lambda module: False)
    try:
        yield
    finally:
        prepare_distributed.generate_composer_model_policy = theirs


@contextmanager
def own_unpickling(task: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which Composer's Trainer loads no code from checkpoints, and full ones lazily, of this task and
    optimizer alone.

    See `plain_pickles`, `lazy` and `same_model` in `recipes.engines.checkpoints`. Composer also evaluates a text in the
    checkpoint as code where an entry has the name of one of its own algorithms; a recipe names all that a run has.
    """
    theirs, apply = composer_checkpoint._torch_load_with_validation, State._apply_required_algorithms

    def load(path: str, map_location: str) -> Any:
        path = os.path.realpath(path)  # Composer links to the file from a temporary folder
        found = upgraded(load_plain(path, lazily=True))
        saved_in(path, found, "composer").check(task, type(optimizer).__name__)
        (state,) = found["state"]["optimizers"].values()
        found["state"]["optimizers"] = {type(optimizer).__qualname__: state}  # the name by which Composer looks for it
        return found

    composer_checkpoint._torch_load_with_validation = load
    State._apply_required_algorithms = lambda *arguments: None
    try:
        with plain_pickles():
            yield
    finally:
        composer_checkpoint._torch_load_with_validation, State._apply_required_algorithms = theirs, apply


@contextmanager
def own_signal_files() -> Iterator[None]:
    """A context in which machines on one file system do not share the files by which Composer waits within a machine.

    Composer gives such a file the same name on all machines. Where the folder of checkpoints is shared, as it must be
    for a resume, each machine removes the file, and all but one fail because it is gone.
    """
    theirs = dist.get_node_signal_file_name
    dist.get_node_signal_file_name = lambda *arguments: f"{theirs(*arguments)}_{dist.get_node_rank()}"
    try:
        yield
    finally:
        dist.get_node_signal_file_name = theirs


class StepTrainer(Trainer):
    """Composer's Trainer, which calls the optimizer's step after the passes of a batch, as Lightning does.

    Composer makes the passes in a closure that it gives to the optimizer. One whose step does not call it would train
    nothing. The host would also wait for the backward pass, to read the loss, before it launches the update.
    """

    def _use_closures(self) -> bool:
        return False


class EndWorkers(Callback):
    """Ends all data workers when the Trainer is closed, which itself leaves those of validation sets."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def close(self, state: State, logger: Logger) -> None:
        self._parts.end_workers()


@own_signal_files()
def new_trainer(recipe: Recipe, place: Place, parts: Parts, optimizer: torch.optim.Optimizer) -> Trainer:
    """Composer's Trainer of a run's parts and the optimizer that they make."""
    # Of an epoch that was complete in the checkpoint.
    warnings.filterwarnings("ignore", message="No batches were trained for global rank")
    # Where the update of the first batch is skipped.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    _ignore_states_of_none(parts)
    run = ComposerRun(parts.task, place.precision)
    checkpoints = recipe.checkpoints
    load_path = load_path_of(recipe)
    start = from_first_rank(start_of(recipe, "composer", load_path))
    if start is not None:
        check_form(recipe, start)
        if start.is_dir():
            by_first_rank(lambda: saved_for(recipe, "composer", start).check(parts.task, type(optimizer).__name__))
    folder = Path(recipe.output, "checkpoints")
    loggers, saver = RunLoggers(parts.loggers), None
    files = CheckpointFiles(folder, KINDS["composer"], checkpoints.keep, checkpoints.bucket, loggers)
    if checkpoints.save:
        saver = WholeCheckpoints(files, at_intervals(checkpoints.every, CHECKPOINT), run)
    callbacks = by_names_of_states(parts.callbacks.items())
    planner = LoadPlanner(parts.task, is_own(optimizer))
    # Composer would look for the size in the loader, and one with a sampler of batches has none.
    microbatch = parts.microbatch or recipe.training.device_batch(dist.get_world_size())
    trainer = StepTrainer(
        model=ComposerTask(parts.task, run.autocast),
        train_dataloader=data_spec(parts.data, parts.copies, lambda: trainer.state.timestamp.batch_in_epoch.value),
        eval_dataloader=[
            Evaluator(
                label=label,
                dataloader=data_spec(loading, parts.copies, look=look_at(parts.task, label, loading)),
                device_eval_microbatch_size=microbatch,
            )
            for label, loading in parts.evals.items()
        ],
        eval_interval=at_intervals(recipe.training.eval_every) if parts.evals else 1,  # else Composer warns
        max_duration=recipe.training.duration,
        optimizers=optimizer,
        schedulers=lambda state, ssr=1.0: parts.schedule(clock_of(state)),
        algorithms=as_algorithms(parts.levers, run, planner),
        parallelism_config={"fsdp": fsdp_config(recipe, start, planner)} if parts.divided else None,
        callbacks=[
            *(run_callback(callback, run, name) for name, callback in callbacks.items()),
            SaveEarly(run, callbacks.values(), parts.levers, saver, checkpoints),
            Generators(),
            *([] if saver is None else [saver]),
            EndIfAsked(run, saver),
            EndWorkers(parts),
        ],
        loggers=[Destination(loggers)],
        run_name=recipe.run_name,
        progress_bar=recipe.training.progress_bar,
        load_path=load_path,
        save_folder=str(folder) if checkpoints.save else None,
        autoresume=checkpoints.resumes,
        device="gpu" if place.use_gpu else "cpu",
        precision=place.precision if place.use_gpu else "fp32",  # see `ComposerRun.use_precision`
        device_train_microbatch_size=microbatch,
        seed=recipe.seed,
        dist_timeout=LIMIT,
    )
    for generators in (trainer._rng_state or [])[dist.get_global_rank() :][:1]:
        check_position(generators)
    for optimizer in trainer.state.optimizers:
        copy_moments(optimizer)
    if parts.divided and recipe.training.fsdp is not None:
        trainer.state.fsdp_config.state_dict_type = recipe.training.fsdp.checkpoints
    if checkpoints.resumes:
        files.catch_up()
    if trainer.state.timestamp.batch.value:
        say_start(start or load_path, trainer.state.timestamp.batch.value)
    return trainer


def _ignore_states_of_none(parts: Parts) -> None:
    """Ignore Composer's warnings that a checkpoint lacks the states of levers and callbacks that have none: those that
    the recipe did not have then, and all callbacks of a sharded checkpoint that has been converted to a full one."""
    named = {**parts.levers.by_names_of_states(), **by_names_of_states(parts.callbacks.items())}
    without = [name for name, hooks in named.items() if type(hooks).state_dict is Hooks.state_dict]
    without += [RunLevers.__name__, *(name for name in OF_COMPOSER if name != Generators.__name__)]
    names = "|".join(map(re.escape, without))
    warnings.filterwarnings("ignore", message=f"({names}) is not in the state_dict")


def load_path_of(recipe: Recipe) -> str | None:
    """The checkpoint that Composer is to load. It fetches those of S3 and of Oracle itself. Every rank must call this.

    It has no client for Azure that works, and its client for Google asks for the bucket itself, which credentials for
    objects do not allow.

    Raises:
        ValueError: Composer would unpack the file, also to places outside of its folder, or read what the file names.
    """
    path, output = recipe.checkpoints.load_path, Path(recipe.output)
    if path is not None and (is_tar(path) or is_compressed_pt(path) or path.endswith(".symlink")):
        raise ValueError(f"checkpoints.load_path: {path} is an archive or a link; give the checkpoint that is in it")
    if scheme_of(path or "") not in ("gs", "azure"):
        return path
    if from_first_rank(recipe.checkpoints.resumes and has_checkpoints(output)):
        return path  # Composer then takes the newest of the run's own
    return str(fetched(path, output))


def fsdp_config(recipe: Recipe, start: Path | None, planner: LoadPlanner) -> FSDP2Config:
    """Composer's settings for a task that the levers of the `training` section divide.

    Composer loads checkpoints only in the form in which it saves them, so this form is at first that of `start`.

    Composer shards nothing (`own_wrapping`), and does what remains: checkpoints and resumption.
    """
    warnings.filterwarnings("ignore", message="FSDP2 Config/APIs are experimental")
    # Which PyTorch itself uses when it writes a sharded checkpoint.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    fsdp = recipe.training.fsdp
    if fsdp is None:
        return FSDP2Config(state_dict_type="full")
    form = fsdp.checkpoints if start is None else "sharded" if start.is_dir() else "full"
    return Sharded(reshard_after_forward=fsdp.strategy == "FULL_SHARD", state_dict_type=form, planner=planner)
