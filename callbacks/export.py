"""Weights in formats that other programs open, without unpickling: diffusers or open_clip folders of safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from composer import Callback, Event, Logger, State
from composer.utils import dist
from torch import nn

from callbacks.interval import at_intervals, ended
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.loading import Loading
from data.vocabulary_files import copy_vocabulary
from recipes.algorithms.averaging.scheduled_ema import averaged, running_average
from recipes.algorithms.sharding.shard import is_sharded, whole_weights


class Export(Callback):
    """Writes <output>/export at intervals and at the end, whole or not at all.

    Where the run has an average of the weights, a diffusion model's export has it beside them (`unet_ema` beside
    `unet`); that of an autoencoder or text encoder, which other jobs open as one folder, has it in their place.
    """

    def __init__(
        self,
        task: nn.Module,
        run_name: str,
        output: str,
        loading: Loading,
        blank: Callable[[], nn.Module],
        *,
        every: Duration | None = None,
    ) -> None:
        """A sharded task is gathered into the first rank's host memory, in `blank`.

        Args:
            every: interval; null: only the end of the run, when weights are always written.
        """
        self.task = task
        self.run_name = run_name
        self.folder = Path(output, "export")
        self.loading = loading
        self.blank = blank
        self.due = at_intervals(every)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if event == Event.FIT_END or (self.due(state, event) and not ended(state)):  # the end comes once, whole
            self._write(state, complete=event == Event.FIT_END)

    def _write(self, state: State, complete: bool) -> None:
        if dist.get_global_rank() != 0 and not is_sharded(self.task):
            return
        record = {
            "run_name": self.run_name,
            "batches": state.timestamp.batch.value,
            "samples": state.timestamp.sample.value,
        }
        ema = running_average(state)
        if ema is not None:
            record["average"] = {"decay": ema.decay, "every": ema.every, "begun": ema.begun}
        average = None if ema is None else lambda: averaged(state)
        task = self.task
        if is_sharded(self.task):
            task, average = self._gathered(average)
            if dist.get_global_rank() != 0:
                return
        export(task, self.loading, self.folder, record, complete, average)
        if complete:
            print(f"weights: {self.folder}", flush=True)

    def _gathered(
        self, average: Callable[[], AbstractContextManager] | None
    ) -> tuple[nn.Module, Callable[[], AbstractContextManager] | None]:
        """A whole task in the first rank's host memory, and how it gets averaged weights. Every rank must call it."""
        raw = whole_weights(self.task)
        if average is not None:
            with average():
                averages = whole_weights(self.task)
        if dist.get_global_rank() != 0:
            return self.task, None
        task = self.blank()
        task.load_state_dict(raw, assign=True)
        if average is None:
            return task, None

        @contextmanager
        def with_averages() -> Iterator[None]:
            task.load_state_dict(averages, assign=True)
            yield
            task.load_state_dict(raw, assign=True)

        return task, with_averages


def export(
    task: nn.Module,
    loading: Loading,
    folder: Path,
    record: dict[str, Any],
    complete: bool,
    average: Callable[[], AbstractContextManager] | None = None,
) -> None:
    """Write a task's weights and what sampling needs beside them.

    Args:
        task: has `export(folder)`, and `export_average(folder)` if both kinds of weights belong in one folder.
        loading: its training data; an encoded set's manifest, its null caption or vocabulary, and local encoders go
            into the folder too.
        folder: replaced at once when all is written.
        record: what export.json (and done.json) says of the run.
        complete: whether the run has ended; only then is there a done.json, by which `make quickstart` skips a stage.
        average: makes a context in which the task has its averaged weights; None: there are none.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if average is not None and hasattr(task, "export_average"):
            task.export(partial)
            with average():
                task.export_average(partial)
        else:
            with nullcontext() if average is None else average():
                task.export(partial)
        if loading.manifest is not None:
            loading.manifest.write(partial)
            if loading.null_text is not None:
                np.save(partial / "null_text.npy", loading.null_text.numpy())
            if loading.vocabulary is not None:
                copy_vocabulary(loading.vocabulary, partial)
            record = {**record, "resolution": loading.resolution}
            _copy_encoders(loading, partial)
        (partial / "export.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        if complete:
            (partial / "done.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what an error left


def _copy_encoders(loading: Loading, folder: Path) -> None:
    """Encoders of a local folder, so that the export can be moved; those of a hub are found by their id."""
    for name in ("image_encoder", "text_encoder"):
        path = (getattr(loading.manifest, name) or {"component": {}})["component"].get("path")
        if path and Path(path).expanduser().is_dir():
            shutil.copytree(Path(path).expanduser(), folder / name)


def replace_folder(new: Path, old: Path) -> None:
    """Rename `new` to `old`, which may exist."""
    aside = old.with_name(f".{old.name}.old.{os.getpid()}")
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
