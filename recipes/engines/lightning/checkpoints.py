"""Checkpoints of a Lightning run: when they are due, where they lie, and how a run goes on from one.

A full checkpoint is one file. A sharded one is a folder, in which each rank writes its part of the weights, of the
optimizer's state and of the levers' tensors, and the first rank everything else; see
`recipes.engines.lightning.checkpoint_format`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from data.remote.stores import STORES, scheme_of
from data.system.log import log
from recipes.config.recipe import Recipe
from recipes.engines.checkpoints.checksums import save_full
from recipes.engines.checkpoints.early_save import EarlySave
from recipes.engines.checkpoints.fetched import fetched
from recipes.engines.checkpoints.files import CheckpointFiles, first_rank_writes, whole
from recipes.engines.checkpoints.further_names import loaded_under_each_name
from recipes.engines.checkpoints.lazy import copied, copy_moments
from recipes.engines.checkpoints.legacy import upgraded
from recipes.engines.checkpoints.lever_states import LEVERS, forms, gathered, joined, kept_state, separated
from recipes.engines.checkpoints.loader_state import kept
from recipes.engines.checkpoints.own_load_plan import OwnLoadPlan
from recipes.engines.checkpoints.own_optimizers import is_own, steps_of_nothing
from recipes.engines.checkpoints.plain_pickles import plain_pickles
from recipes.engines.checkpoints.save_planner import save_sharded
from recipes.engines.counts import Counts
from recipes.engines.generators import generator_states
from recipes.engines.lightning.checkpoint_format import FORMAT, read_file
from recipes.engines.lightning.data import RunBatches
from recipes.engines.lightning.run import LightningRun
from recipes.engines.parts import Parts
from recipes.engines.resuming import saved_for, say_start, says_what_to_remove, start_of
from recipes.training.checkpoint_names import KINDS, REST
from recipes.training.clock import CheckpointInterval
from recipes.training.finite import is_worth_keeping
from recipes.training.hooks import Hooks, by_names_of_states
from recipes.training.ranks import by_first_rank, from_first_rank


class Checkpoints:
    """Saves a run's checkpoints, and loads the one that it goes on from.

    Attributes:
        path: of the checkpoint that the run goes on from; None: it begins.
        generators: states of all ranks' generators in that checkpoint, from `load` to the first batch; else None. A run
            that ends before its first batch, as one that was complete, passes them on.
    """

    def __init__(self, recipe: Recipe, parts: Parts, run: LightningRun, batches: RunBatches) -> None:
        """Find the checkpoint to go on from, and set the run's counts to it.

        Args:
            recipe: says what is saved and loaded.
            parts: whose states are saved.
            run: whose counts are saved.
            batches: whose position is saved.

        Raises:
            ValueError: the checkpoint is not one of this engine.
        """
        self._config = recipe.checkpoints
        self._folder = Path(recipe.output) / "checkpoints"
        self._sharded = recipe.training.fsdp is not None and recipe.training.fsdp.checkpoints == "sharded"
        self._parts = parts
        self._run = run
        self._batches = batches
        self._due = CheckpointInterval(recipe.checkpoints.every)
        self._saved_at = -1  # batch
        self.files = CheckpointFiles(
            self._folder, KINDS["lightning"], self._config.keep, self._config.bucket, run.loggers
        )
        every, minutes = self._config.every, self._config.minutes
        self._early = EarlySave(run, parts.callbacks.values(), self.files, every, minutes, parts.levers)
        self.generators: list[dict[str, Any]] | None = None
        address = self._config.load_path
        found = from_first_rank(start_of(recipe, "lightning", address) or address)
        self.path = self._fetch(found) if isinstance(found, str) else found
        if self.path is not None:
            self._saved = by_first_rank(lambda: saved_for(recipe, "lightning", self.path))
            with self._says_what_to_remove():
                run.counts = Counts(**read_file(self._rest_of(self.path), lazily=True)["counts"])
        if self._config.resumes:
            self.files.catch_up()

    # --- loading -------------------------------------------------------------------------------

    def _fetch(self, address: str) -> Path:
        """A checkpoint of a bucket as a file or folder in the run's folder. Every rank must call it."""
        if scheme_of(address) not in STORES:
            known = ", ".join(f"{name}://" for name in STORES)
            raise ValueError(
                f"checkpoints.load_path: {address}: the engine lightning loads checkpoints from disks, {known}; "
                "copy the checkpoint to one first"
            )
        return fetched(address, self._folder.parent)

    def _says_what_to_remove(self) -> AbstractContextManager:
        return says_what_to_remove(self._folder, KINDS["lightning"], self._config)

    @staticmethod
    def _rest_of(path: Path) -> Path:
        return path / REST if path.is_dir() else path

    def load(self) -> None:
        """Take over the checkpoint, where there is one. Every rank must call it, with the optimizer built.

        Raises:
            ValueError: the checkpoint is of another model or optimizer.
        """
        if self.path is None:
            return
        self._saved.check(self._run.task, type(self._run.optimizer).__name__)
        with self._says_what_to_remove():
            state = upgraded(read_file(self._rest_of(self.path), lazily=True))
            if self.path.is_dir():
                parts = self._read_parts(self.path)
                state |= parts | {LEVERS: joined(state[LEVERS], parts[LEVERS])}
        self._load_weights(state)
        levers, callbacks = self._parts.levers.by_names_of_states(), by_names_of_states(self._parts.callbacks.items())
        for name, lever in levers.items():
            if name in state[LEVERS]:
                lever.load_state_dict(state[LEVERS][name])
        for name, callback in callbacks.items():
            if name in state["callbacks"]:
                callback.load_state_dict(copied(state["callbacks"][name]))
        for name, hooks in (levers | callbacks).items():
            # Such as one of which another of its class has been added, by whose label it is now told from that one.
            if name not in state[LEVERS] | state["callbacks"] and type(hooks).state_dict is not Hooks.state_dict:
                log.warning(f"checkpoints: {self.path} has no state of {name}, which begins anew")
        if self._run.scaler is not None and state["scaler"]:
            self._run.scaler.load_state_dict(state["scaler"])
        self._batches.load_state_dict(copied(state["data"]))
        self.generators = copied(state["generators"])
        say_start(self.path, self._run.counts.batch)

    def _load_weights(self, state: dict[str, Any]) -> None:
        run = self._run
        options = StateDictOptions(full_state_dict=not self.path.is_dir())
        with loaded_under_each_name():
            set_model_state_dict(run.task, state["weights"], options=options)
        if not self._parts.divided:
            options = StateDictOptions()  # takes over exactly what was saved
        groups = [dict(group) for group in run.optimizer.param_groups]
        with steps_of_nothing():
            set_optimizer_state_dict(run.task, run.optimizer, state["optimizer"], options=options)
        for group, new in zip(run.optimizer.param_groups, groups, strict=True):
            # Of a saved group that is several now, PyTorch gives the settings to the last one, and the others get none.
            group |= {name: value for name, value in new.items() if name not in group}
        copy_moments(run.optimizer)
        run.peak_rates_changed()

    def _read_parts(self, path: Path) -> dict[str, Any]:
        """This rank's part of a sharded checkpoint, from any number of ranks."""
        with plain_pickles():
            reader = dcp.FileSystemReader(path)
            parts = self._tensors(full=False) | {LEVERS: forms(reader.read_metadata(), self._run.task)}
            dcp.load(parts, storage_reader=reader, planner=OwnLoadPlan(is_own(self._run.optimizer)))
        return parts

    # --- saving --------------------------------------------------------------------------------

    def save_early(self) -> None:
        """Save a checkpoint that is due, before callbacks act and validation. Every rank must call it."""
        if self._config.save:
            self._early.before(self.save)

    def save_if_due(self) -> None:
        """Save a checkpoint that is due and not saved yet, or must be saved again. Every rank must call it."""
        if not self._config.save:
            return
        self._early.after(self.save)
        if self._due(self._run.clock) and self._saved_at != self._run.counts.batch:
            self.save()

    def save_and_wait(self) -> None:
        """Save a checkpoint unless there is one of this batch, and wait for its copy. Every rank must call it."""
        if self._saved_at != self._run.counts.batch:
            self.save()
        self.files.wait()

    def save(self) -> None:
        """Save a checkpoint now, unless weights or losses are not finite. Every rank must call it."""
        counts = self._run.counts
        self._saved_at = counts.batch
        if not is_worth_keeping(self._run):
            log.warning(f"checkpoints: batch {counts.batch} is not finite; the checkpoints before it stay")
            return
        path = self._folder / self.files.kind.name_of(counts.epoch, counts.batch, self._sharded)
        rest, tensors = self._state(), self._tensors(full=not self._sharded)
        if self._sharded:
            rest[LEVERS], tensors[LEVERS] = separated(rest[LEVERS], dict(self._run.task.named_parameters()))
        else:
            rest[LEVERS] = gathered(rest[LEVERS])
        with whole(path) as partial:
            if self._sharded:
                save_sharded(tensors, partial, counts.batch)
            values, file = (rest, partial / REST) if self._sharded else (rest | tensors, partial)
            first_rank_writes(path, lambda: save_full(values, file))
        self.files.newest_is(path, counts.batch)

    def _tensors(self, full: bool) -> dict[str, Any]:
        """Weights and the optimizer's state by the names of parameters; whole ones on the first rank only."""
        run = self._run
        gathers = full and self._parts.divided
        options = StateDictOptions(full_state_dict=gathers, cpu_offload=gathers)
        with steps_of_nothing():
            return {
                "weights": get_model_state_dict(run.task, options=options),
                "optimizer": get_optimizer_state_dict(run.task, run.optimizer, options=options),
            }

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides `_tensors`."""
        run = self._run
        levers, callbacks = self._parts.levers.by_names_of_states(), by_names_of_states(self._parts.callbacks.items())
        return {
            "format": FORMAT,
            "counts": vars(run.counts).copy(),
            "optimizer_name": type(run.optimizer).__name__,
            "scaler": {} if run.scaler is None else run.scaler.state_dict(),
            "data": kept(self._batches.state_dict()),
            LEVERS: {name: kept_state(name, lever) for name, lever in levers.items()},
            "callbacks": {name: kept_state(name, callback) for name, callback in callbacks.items()},
            "generators": generator_states() if self.generators is None else self.generators,
        }
