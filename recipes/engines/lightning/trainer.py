"""Trains a recipe with Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from data.system.log import log
from recipes.config.recipe import Recipe
from recipes.config.values import plain_values
from recipes.engines.checkpoints.files import end_if_asked
from recipes.engines.counts import epoch_batches, in_present_batches
from recipes.engines.generators import restore_generators, seed_all, set_apart
from recipes.engines.lightning.checkpoints import Checkpoints
from recipes.engines.lightning.data import RunBatches
from recipes.engines.lightning.hook_calls import BetweenBatches, HookCalls
from recipes.engines.lightning.module import TaskModule
from recipes.engines.lightning.processes import local_rank, local_world_size, start_process_group
from recipes.engines.lightning.run import LightningRun
from recipes.engines.lightning.strategies import strategy_of
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.parts import Parts, Place, build_parts
from recipes.engines.precision import allow_tf32
from recipes.engines.record import keep_record
from recipes.planning.run_summary import opening
from recipes.training.callback import is_complete
from recipes.training.ranks import is_first_rank, rank, world_size

# What Lightning says to its users about choices that this engine has made.
WARNINGS = (
    ".*Total length of `.*` across ranks is zero.*",
    ".*Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
    "TypedStorage is deprecated",  # which PyTorch itself uses when it writes a sharded checkpoint
)


@dataclass
class LightningTraining:
    """A run, ready for `fit`.

    Attributes:
        trainer: Lightning's.
        module: what it trains.
        run: what levers and callbacks see.
        parts: of the run.
        loggers: where figures go.
        checkpoints: of the run.
    """

    trainer: pl.Trainer
    module: TaskModule
    run: LightningRun
    parts: Parts
    loggers: RunLoggers
    checkpoints: Checkpoints

    def fit(self) -> None:
        """Train to the end of the run."""
        with self.loggers.closed_by_errors():
            self.trainer.fit(self.module)

    def close(self) -> None:
        """End the data workers, wait for the last checkpoint's copy, close the loggers, and wait for the other ranks.

        Raises:
            ValueError: the checkpoint could not be copied.
        """
        with self.loggers.closed_by_errors():
            self.parts.end_workers()
            self.checkpoints.files.finish()
        self.loggers.close("FINISHED")
        if world_size() > 1:
            torch.distributed.barrier()


def train(recipe: Recipe) -> None:
    """Train a recipe to its end, from its newest checkpoint where it resumes.

    Raises:
        ValueError: batch sizes that do not divide, data that does not fit the model, weights that do not load.
    """
    training = build_trainer(recipe)
    clock = training.run.clock
    if clock.ended:
        log.info(f"already trained to {recipe.training.duration}: {recipe.output}")
    if not clock.ended or not is_complete(training.parts.callbacks.values(), clock):
        training.fit()  # which begins and ends a run that has no batches left
    training.close()


def build_trainer(recipe: Recipe, change: Callable[[Parts], None] = lambda parts: None) -> LightningTraining:
    """Everything that a run needs, ready for `fit()`. Raises as `train`.

    Args:
        recipe: of the run.
        change: called with the run's parts before the engine takes them; measurements add callbacks of their own.
    """
    use_gpu = Place.of(recipe, 1).use_gpu
    start_process_group(use_gpu)
    if use_gpu:
        allow_tf32()
    seed_all(recipe.seed)  # the same initial weights on every rank
    place = Place.of(recipe, local_world_size())
    parts = build_parts(recipe, place, "lightning")
    change(parts)
    if is_first_rank():
        keep_record(recipe, parts.data)
    log.info(opening(recipe, parts.task, parts.data, parts.evals, world=world_size(), precision=place.precision))
    training = new_training(recipe, place, parts)
    training.loggers.log_settings({"recipe": plain_values(recipe)})
    return training


def new_training(recipe: Recipe, place: Place, parts: Parts) -> LightningTraining:
    """Lightning's Trainer of a run's parts."""
    loggers = RunLoggers(parts.loggers)
    with loggers.closed_by_errors():
        return _with_loggers(recipe, place, parts, loggers)


def _with_loggers(recipe: Recipe, place: Place, parts: Parts, loggers: RunLoggers) -> LightningTraining:
    """See `new_training`."""
    run = LightningRun(
        parts.task,
        device=torch.device("cuda", local_rank()) if place.use_gpu else torch.device("cpu"),
        precision=place.precision,
        duration=recipe.training.duration,
        epoch_batches=epoch_batches(parts.data),
        microbatch=parts.microbatch,
        loggers=loggers,
    )
    hooks = HookCalls(parts, run)
    batches = RunBatches(
        parts.data,
        run,
        before_data=lambda: hooks.call("before_data"),
        end_epoch=lambda: between.end_epoch(),
        global_batch=recipe.training.global_batch,
    )
    checkpoints = Checkpoints(recipe, parts, run, batches)
    run.counts = in_present_batches(
        run.counts, parts.data, global_batch=recipe.training.global_batch, ranks=world_size() // parts.copies
    )
    between = BetweenBatches(
        parts,
        run,
        hooks,
        eval_every=recipe.training.eval_every,
        load=lambda: load_and_seed(checkpoints, recipe.seed),
        first_batch=lambda: restore_saved(checkpoints),
        save_early=checkpoints.save_early,
        save=checkpoints.save_if_due,
        end_if_asked=lambda: end_if_asked(run, checkpoints.save_and_wait if recipe.checkpoints.save else None),
    )
    module = TaskModule(parts, run, hooks, between, batches, seed=recipe.seed)
    return LightningTraining(new_trainer(recipe, place, run, between, parts), module, run, parts, loggers, checkpoints)


def load_and_seed(checkpoints: Checkpoints, seed: int) -> None:
    """Load the checkpoint, and seed each rank on its own, whatever was drawn while the model was prepared."""
    checkpoints.load()
    seed_all(seed + rank())


def restore_saved(checkpoints: Checkpoints) -> None:
    """The generators go on where the checkpoint's run stopped, whatever was drawn until the first batch came."""
    if checkpoints.generators is not None:
        restore_generators(checkpoints.generators)
        set_apart()
        checkpoints.generators = None


def new_trainer(
    recipe: Recipe, place: Place, run: LightningRun, between: BetweenBatches, parts: Parts
) -> pl.Trainer:
    """Lightning's Trainer without what this engine does by itself: precision, checkpoints, loggers, signals."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    trainer = pl.Trainer(
        accelerator="gpu" if place.use_gpu else "cpu",
        devices=place.local_world_size,
        num_nodes=world_size() // place.local_world_size,
        strategy=strategy_of(run, parts.divided, parts.levers.average),
        plugins=[TorchElasticEnvironment()],  # of processes that exist, whatever started them
        precision="32-true",
        callbacks=[between],
        max_epochs=1,  # the whole run; see `RunBatches`
        check_val_every_n_epoch=2,  # never: `BetweenBatches` starts validation
        limit_val_batches=1.0 if parts.evals else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=recipe.training.progress_bar,
        use_distributed_sampler=False,
        inference_mode=False,  # tensors of validation may be used in training
    )
    leave_signals_alone(trainer)
    return trainer


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """A signal ends a process, as it does without Lightning.

    Lightning finishes the batch at SIGTERM and then leaves with status 0, which launchers take for success; it hangs if
    only some ranks get the signal; and to agree on it, it makes all ranks wait for each other in each batch.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
