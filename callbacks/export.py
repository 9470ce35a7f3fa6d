"""Writes a run's weights at intervals and at its end, in formats that other programs open without unpickling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callbacks.averaged import averaged
from callbacks.divided_weights import host_bytes, write_divided
from data.aliases import Duration
from data.cost import FLOAT, Cost, Files, Plan, size_text
from data.loading import Batch, Loading
from data.system.files import read_if_object
from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import is_sharded, whole_weights
from recipes.exports.encoder_files import encoder_files
from recipes.exports.folder import bundle_of, export, export_folder
from recipes.models.task import Task
from recipes.training.callback import PeriodicCallback
from recipes.training.clock import Clock
from recipes.training.finite import is_worth_keeping
from recipes.training.modes import evaluation_mode
from recipes.training.ranks import by_first_rank, is_first_rank, on_all_ranks
from recipes.training.run import Run


class Export(PeriodicCallback):
    """Writes <output>/export at intervals and at the end, atomically.

    If the run averages its weights, the export of a diffusion model holds the averaged weights beside the raw ones
    (`unet_ema` beside `unet`). The export of an autoencoder or text encoder, which other jobs open as one folder, holds
    only the averaged weights.
    """

    def __init__(
        self,
        task: Task,
        run_name: str,
        output: str,
        loading: Loading,
        blank: Callable[[], Task],
        average: ScheduledEMA | None,
        started_from: str | None,
        *,
        every: Duration | None = None,
    ) -> None:
        """A sharded task is written tensor by tensor, or gathered into the first rank's host memory, in a task that
        `blank` makes; see `Task.exported`.

        Args:
            every: interval; null: only at the end of the run, when weights are always written.
        """
        super().__init__(every)
        self.task = task
        self.run_name = run_name
        self.folder = Path(output, "export")
        self.loading = loading
        self.blank = blank
        self.average = average
        self.started_from = started_from

    def act(self, run: Run) -> None:
        if run.clock.ended:  # the last export is written once, by `end`
            return
        if is_worth_keeping(run):
            self._write(run, complete=False)
        else:
            log.warning(f"export: batch {run.clock.batch} is not finite; {self.folder} is left as it is")

    def is_complete(self, clock: Clock) -> bool:
        return read_if_object(self.folder / "done.json").get("batches") == clock.batch

    def end(self, run: Run) -> None:
        """Write the last export.

        Raises:
            ValueError: a weight is not finite.
        """
        if not is_worth_keeping(run):
            raise ValueError(f"export: weights are not finite at the end of the run; {self.folder} is left as it is")
        self._write(run, complete=True)

    def _write(self, run: Run, complete: bool) -> None:
        """Every rank must call it: the first one writes, and the others wait here, however long it takes."""
        record = {"run_name": self.run_name, "batches": run.clock.batch, "samples": run.clock.sample}
        if self.started_from is not None:
            record["started_from"] = self.started_from
        ema, average = self.average, None
        if ema is not None and ema.running:
            record["average"] = {"decay": ema.decay, "every": ema.every, "begun": ema.begun}
            average = partial(self._averaged, run, self._to_measure(run))
        if is_sharded(self.task) and self.task.exported is not None:
            self._write_divided(record, complete, average)
        else:
            task, average = self._gathered(average) if is_sharded(self.task) else (self.task, average)
            by_first_rank(lambda: export(task, self.loading, self.folder, record, complete, average))
        if complete:
            log.info(f"weights: {self.folder}")

    def _to_measure(self, run: Run) -> Batch | None:
        """The batch on which `Task.measure` compares averaged weights; None: the task measures nothing, or there is no
        batch. A start that finds the run at its end takes one of the loader, which every rank must do."""
        if type(self.task).measure is Task.measure:
            return None
        batch = run.batch or next(iter(self.loading.loader), None)
        if batch is None:
            log.warning(
                f"export: the data has no batch left to measure averaged weights on, so what {self.folder} says of "
                "them is of those of training; make training.duration a batch longer, and start again"
            )
        return batch

    @contextmanager
    def _averaged(self, run: Run, batch: Batch | None) -> Iterator[None]:
        """A context in which the task has its averaged weights, and what its export says of weights is of these."""
        before = None if batch is None else self._measured(run, batch)
        with (
            averaged(self.average),
            nullcontext() if before is None else self.task.measured(before, self._measured(run, batch)),
        ):
            yield

    def _measured(self, run: Run, batch: Batch) -> Tensor:
        with torch.no_grad(), run.autocast(), evaluation_mode(self.task):
            return self.task.measure(batch)

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """The weights and encoders that it writes, see `data.cost`."""
        size = FLOAT * plan.parameters
        both = plan.averaged and plan.task.exports_average_beside
        what = f"{size_text(size)} of weights" + (f", {size_text(2 * size)} with the averaged ones" if both else "")
        files = () if plan.manifest is None else encoder_files(plan.manifest)
        encoders = sum(file.stat().st_size for file, _ in files)
        what += f", and {size_text(encoders)} of encoders" if encoders else ""
        held = size * (2 if both else 1) + encoders
        held *= 1 if args["every"] is None else 2  # the next one is whole before one goes
        lines = ()
        if plan.shards > 1:
            part, at_once = plan.task.exported, size * (2 if plan.averaged else 1)
            if part is not None:
                at_once = host_bytes(plan.task.get_submodule(part).state_dict().values())
            lines = (f"{size_text(at_once)} of host memory on the first machine while the weights are written",)
        return Cost(files=Files(args["every"], what, f"{plan.output}/export", held), lines=lines)

    def _write_divided(
        self, record: dict[str, Any], complete: bool, average: Callable[[], AbstractContextManager] | None
    ) -> None:
        """Write a sharded task, of which no rank ever holds the whole. Every rank must call it."""
        beside = average is not None and self.task.exports_average_beside
        first = average if average is not None and not beside else nullcontext
        with ExitStack() as stack:  # of the first rank, whose folder is removed after an error of any rank
            bundle = bundle_of(self.loading.manifest, self.folder)
            frame = export_folder(self.task, self.loading, self.folder, record, complete, bundle)
            new = by_first_rank(lambda: stack.enter_context(frame))
            for is_average, context in [(False, first), *([(True, average)] if beside else [])]:
                with context():
                    write_divided(self.task, new, self.folder, is_average)
            by_first_rank(stack.close)

    def _gathered(
        self, average: Callable[[], AbstractContextManager] | None
    ) -> tuple[Task, Callable[[], AbstractContextManager] | None]:
        """A whole task in the first rank's host memory, and how it gets averaged weights. Every rank must call it."""
        raw = whole_weights(self.task)
        if average is not None:
            with average():
                averages = whole_weights(self.task)

        def built() -> Task:
            if not is_first_rank():
                return self.task
            task = self.blank()
            task.load_state_dict(raw, assign=True)
            return task

        task = on_all_ranks(built)
        if average is None or not is_first_rank():
            return task, None

        @contextmanager
        def with_averages() -> Iterator[None]:
            task.load_state_dict(averages, assign=True)
            yield
            task.load_state_dict(raw, assign=True)

        return task, with_averages
