"""One Lightning callback that calls levers and callbacks of this repository, and does what comes between batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from data.loading import WEIGHT
from recipes.engines.lightning.run import LightningRun
from recipes.engines.metrics import Figure, figures_of
from recipes.engines.parts import Parts
from recipes.training.clock import Interval
from recipes.training.hooks import stops_nothing


class HookCalls:
    """Calls the hooks of levers, then those of callbacks; see `recipes.training.hooks.Hooks`."""

    def __init__(self, parts: Parts, run: LightningRun) -> None:
        """
        Args:
            parts: levers and callbacks.
            run: is shown to them.
        """
        self._parts = parts
        self._run = run

    def call(self, hook: str) -> None:
        """Call a hook that levers and callbacks have."""
        self._parts.levers.call(hook, self._run)
        for callback in self._parts.callbacks.values():
            getattr(callback, hook)(self._run)

    def gradients_finished(self) -> None:
        """All microbatches of a batch are done; the optimizer steps next."""
        self._parts.levers.finish_gradients(self._run)
        for callback in self._parts.callbacks.values():
            callback.gradients_ready(self._run)

    def after_save(self) -> None:
        """A checkpoint that is due at the end of a batch or of an epoch has been saved."""
        for callback in self._parts.callbacks.values():
            callback.after_save(self._run)


class BetweenBatches(pl.Callback):
    """Begins and ends batches, epochs, validation and the run, in the order that Composer has."""

    def __init__(
        self,
        parts: Parts,
        run: LightningRun,
        hooks: HookCalls,
        *,
        eval_every: str | None,
        load: Callable[[], None],
        first_batch: Callable[[], None],
        save_early: Callable[[], None],
        save: Callable[[], None],
        end_if_asked: Callable[[], None],
    ) -> None:
        """
        Args:
            parts: of the run.
            run: where counts are kept.
            hooks: of levers and callbacks.
            eval_every: interval of validation; None: only the end of the run.
            load: loads the checkpoint, where there is one; the model is in place and the optimizer built.
            first_batch: called when the first batch has arrived.
            save_early: saves a checkpoint if one is due, before what may fail at the same batch.
            save: saves it if one is due that is not saved yet, or must be saved again.
            end_if_asked: called after each batch; ends the process where a rank got a signal.
        """
        self._parts = parts
        self._run = run
        self._hooks = hooks
        self._eval_due = Interval(eval_every)
        self._load = load
        self._first_batch: Callable[[], None] | None = first_batch
        self._save_early = save_early
        self._save = save
        self._end_if_asked = end_if_asked
        self._labels = list(parts.evals)
        self._metrics: dict[str, Figure] = {}
        self._trainer: pl.Trainer | None = None

    # --- the run -------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._load()
        self._hooks.call("loaded")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hooks.call("begin")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not at on_fit_end, when the model has left its device.
        self._log_time()
        self._hooks.call("end")

    # --- batches -------------------------------------------------------------------------------

    @stops_nothing
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        if self._first_batch is not None:
            self._first_batch()
            self._first_batch = None
        self._run.begin_batch(batch)
        self._hooks.call("batch_start")
        self._log_time()

    @stops_nothing
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._hooks.call("step_end")
        self._save_and_validate()
        self._end_if_asked()
        if self._run.epoch_is_complete:
            self.end_epoch()
        if self._run.clock.ended:
            trainer.should_stop = True

    def end_epoch(self) -> None:
        """Count the present epoch, which is complete."""
        self._run.epoch_done()
        self._hooks.call("epoch_end")
        self._save_and_validate()

    def _save_and_validate(self) -> None:
        self._save_early()
        self._hooks.after_save()
        self._validate_if_due()
        self._save()

    def _log_time(self) -> None:
        self._run.log({f"time/{name}": count for name, count in vars(self._run.counts).items()})

    # --- validation ----------------------------------------------------------------------------

    def _validate_if_due(self) -> None:
        """Run Lightning's validation loop at the recipe's interval, which Lightning's own settings cannot express."""
        if not self._eval_due(self._run.clock) or not self._labels:
            return
        trainer = self._trainer
        # As Lightning's training loop does around this loop.
        first = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first

    @stops_nothing
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0:
            if dataloader_idx > 0:
                self._end_set()
            self._run.eval_label = self._labels[dataloader_idx]
            self._hooks.call("eval_start")
            self._metrics = {
                name: figure.to(self._run.device) for name, figure in figures_of(self._run.task).items()
            }

    def evaluate(self, microbatch: dict[str, Tensor]) -> None:
        """Evaluate a microbatch of a validation set, which is on the device and transformed."""
        run = self._run
        run.batch = microbatch
        self._hooks.call("eval_before_forward")
        with run.autocast():
            run.outputs = run.task.evaluate(run.batch)
        self._hooks.call("eval_after_forward")
        with run.autocast():
            for metric in self._metrics.values():
                metric.update(run.outputs, run.batch.get(WEIGHT))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_set()

    def _end_set(self) -> None:
        run = self._run
        figures = {name: metric.compute() for name, metric in self._metrics.items()}
        run.log({f"metrics/{run.eval_label}/{name}": value for name, value in figures.items()})
        run.eval_figures = {name: float(value) for name, value in figures.items()}
        self._hooks.call("eval_end")
