"""Composer's checkpoints, written so that each appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from composer import Callback as ComposerCallback
from composer import Event, State
from composer.callbacks import CheckpointSaver
from composer.loggers import Logger
from composer.utils import reproducibility
from torch import nn

from data.system.log import log
from recipes.config.recipe import Checkpoints
from recipes.engines.checkpoints.checksums import save_full
from recipes.engines.checkpoints.early_save import EarlySave
from recipes.engines.checkpoints.files import CheckpointFiles, end_if_asked, first_rank_writes, whole
from recipes.engines.checkpoints.lever_states import LEVERS, gathered, separated
from recipes.engines.checkpoints.loader_state import kept
from recipes.engines.checkpoints.own_optimizers import steps_of_nothing
from recipes.engines.checkpoints.save_planner import save_sharded
from recipes.engines.composer.run import ComposerRun
from recipes.training.callback import Callback
from recipes.training.checkpoint_names import KINDS
from recipes.training.finite import is_worth_keeping
from recipes.training.lever import Lever


class WholeCheckpoints(CheckpointSaver):
    """Composer's own saver writes under the final name, where the next start finds half a file and refuses to go on.

    It also removes the link to the newest checkpoint for a moment, and forgets older checkpoints when a run goes on.
    """

    def __init__(self, files: CheckpointFiles, due: Callable[[State, Event], bool], run: ComposerRun) -> None:
        """
        Args:
            files: where checkpoints lie.
            due: whether one is saved at an event.
            run: whose weights must be finite.
        """
        super().__init__(
            str(files.folder),
            save_interval=due,
            overwrite=True,  # what lies there is of a run that was killed before the link pointed to it
            num_checkpoints_to_keep=files.keep,
        )
        self.files = files
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads nothing: Composer's saver would restore the names of all checkpoints that were ever saved."""

    def save(self, state: State, logger: Logger) -> None:
        """Save a checkpoint now. Every rank must call it."""
        self._save_checkpoint(state, logger)

    def save_and_wait(self, state: State, logger: Logger) -> None:
        """Save a checkpoint unless there is one of this batch, and wait for its copy. Every rank must call it."""
        if self.last_checkpoint_batch != state.timestamp.batch:
            self.save(state, logger)
        self.files.wait()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.files.finish()

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Called by the methods of CheckpointSaver, on every rank."""
        self.last_checkpoint_batch = state.timestamp.batch
        epoch, batch = state.timestamp.epoch.value, state.timestamp.batch.value
        if not is_worth_keeping(self._run):
            log.warning(f"checkpoints: batch {batch} is not finite; the checkpoints before it stay")
            return
        sharded = state.fsdp_sharded_state_dict_enabled
        path = self.files.folder / (KINDS["composer"].name_of(epoch, batch, sharded))
        _write(state, path, sharded, self._run.task)
        self.files.newest_is(path, batch)


def _write(state: State, path: Path, sharded: bool, task: nn.Module) -> None:
    """Does what Composer's `_save_checkpoint` does, and saves the tensors of levers like those of the model."""
    with steps_of_nothing():
        saved = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}  # gathered from all ranks
    if (position := saved["state"].get("dataset_state", {}).get("train")) is not None:
        kept(position)
    levers = dict(saved["state"]["algorithms"])
    with whole(path) as partial:
        if sharded:
            levers, saved[LEVERS] = separated(levers, dict(task.named_parameters()))
            saved["state"]["algorithms"] = [*levers.items()]
            batch = state.timestamp.batch.value
            save_sharded(saved, partial, batch, dedup_save_to_lowest_rank=True)
            return
        saved["state"]["algorithms"] = [*gathered(levers).items()]
        first_rank_writes(path, lambda: save_full(saved, partial))


class SaveEarly(ComposerCallback):
    """Calls `after_save` of the recipe's callbacks, and saves a checkpoint that is due before; see `EarlySave`.

    It comes after these callbacks, so that they have seen the end of the batch, and before the saver.
    """

    def __init__(
        self,
        run: ComposerRun,
        callbacks: Iterable[Callback],
        levers: Iterable[Lever],
        saver: WholeCheckpoints | None,
        config: Checkpoints,
    ) -> None:
        """
        Args:
            run: is shown to callbacks.
            callbacks: of the recipe.
            levers: of the recipe.
            saver: None: the recipe saves nothing.
            config: says when checkpoints are due.
        """
        self._run = run
        self._callbacks = list(callbacks)
        self._saver = saver
        self._early = None
        if saver is not None:
            self._early = EarlySave(run, self._callbacks, saver.files, config.every, config.minutes, levers)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._early is not None:
            self._early.before(lambda: self._saver.save(state, logger))
        for callback in self._callbacks:
            callback.after_save(self._run)

    epoch_end = batch_end

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._early is not None:
            self._early.after(lambda: self._saver.save(state, logger))

    epoch_checkpoint = batch_checkpoint


class EndIfAsked(ComposerCallback):
    """Ends the run after a batch in which a rank got a signal; see `end_if_asked`. It comes after the saver."""

    def __init__(self, run: ComposerRun, saver: WholeCheckpoints | None) -> None:
        """
        Args:
            run: which may be asked to stop.
            saver: None: the recipe saves nothing.
        """
        self._run = run
        self._saver = saver

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        saver = self._saver
        end_if_asked(self._run, None if saver is None else lambda: saver.save_and_wait(state, logger))
