"""Rates of the shipped recipes' training on random data: as shipped, with one change at a time, with all that pay."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from composer import Callback as ComposerCallback
from composer import Logger, State

from benchmarks.common.random_latents import REDUCTION
from benchmarks.common.reporting import reason
from benchmarks.common.steady import Steady, UnderLightning, run_until
from benchmarks.common.training import unet_flops
from benchmarks.gpu_run.context import Context
from benchmarks.gpu_run.device import measured_rate
from benchmarks.gpu_run.operators import OneStep, bound_by, kernels_of, write_profile
from benchmarks.gpu_run.records import RELATIVE
from benchmarks.gpu_run.subjects import (
    BEST,
    SHIPPED,
    START,
    SUBJECTS,
    Subject,
    all_that_pay,
    recipe_for,
    shipped_change,
    single_changes,
    why_not_compared,
)
from callbacks.number_format import number_format_of
from data.system.log import log
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe
from recipes.engines import first_weights
from recipes.engines.composer.trainer import build_trainer
from recipes.models.task import Task
from recipes.planning.hardware.peak_flops import NumberFormat, peak_flops


class Wait(ComposerCallback):
    """When the first two steps were done, in seconds since it was made: what compiling costs."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 2:
            if state.device.name == "gpu":
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began


def setting(context: Context, *, subject: str, name: str, profiled: bool = False, like: str | None = None) -> None:
    """Measure one setting of a subject, as a row of its table.

    Args:
        subject: in `SUBJECTS`.
        name: of the setting: `SHIPPED`, `START`, `BEST`, or one of `single_changes`.
        profiled: whether one step is profiled as well.
        like: the subject whose changes are tried, for `BEST`; None: this one.

    Raises:
        ValueError: `BEST` without a starting point to compare with.
    """
    measured = SUBJECTS[subject]
    change: list[str] = []
    if name == BEST:
        source = SUBJECTS[like or subject]
        rows = context.records.rows(source.table)
        if missing := why_not_compared(rows, source.unit):
            raise ValueError(f"{missing} of {source.table} by this commit on this GPU; run its steps as well")
        change = all_that_pay(rows, source.unit)
        if like:  # sizes are other at another resolution
            change = [text for text in change if not text.startswith("training.microbatch")]
        if not change:
            context.records.note(measured.table, "No single change was faster than the starting point.")
            return
    elif name == SHIPPED:
        change = shipped_change(measured, context.small)
    elif name != START:
        change = list(single_changes(measured, context.small)[name])
    changes = [] if name == SHIPPED else [*measured.start, *change]
    values: dict[str, Any] = {"setting": name if name != BEST else f"{name}: {', '.join(change)}"}
    # The step after those that are timed: a profiler may slow the ones that follow it.
    profile_step = OneStep(sum_of_steps(context.small)) if profiled else None
    profiler, kernels = None, None
    try:
        found, seconds, number_format = measure(measured, changes, context, profile_step)
        values |= found
    except Exception as error:
        values[measured.unit] = reason(error)
        raise
    else:
        profiler = None if profile_step is None else profile_step.profiler
        kernels = None if profiler is None else kernels_of(profiler)
        if kernels is not None:
            flops, product_rate = 1e12 * values["TFLOP/s"] * seconds, measured_rate(context, number_format)
            values["bound by"] = bound_by(kernels, seconds, flops, product_rate)
    finally:
        rate = values.get(measured.unit)
        numeric = {"rate": rate} if isinstance(rate, int | float) else {}
        context.records.row(measured.table, values, setting=name, change=change, **numeric)
    context.records.note(
        measured.table, f"Starting point: yamls/{measured.yaml} with {', '.join(measured.start) or 'no change'}."
    )
    if profiler is not None:
        write_profile(context, profiler, kernels, f"{measured.table}, {name}: one step", f"trace_{subject}.json.gz")


def steps_of(small: bool) -> tuple[int, int, int]:
    """Steps of warm-up, windows, and steps per window."""
    return (4, 2, 1) if small else (5, 3, 3)


def sum_of_steps(small: bool) -> int:
    """All steps up to the end of the last window."""
    warm_up, windows, steps = steps_of(small)
    return warm_up + windows * steps


def measure(
    subject: Subject, changes: list[str], context: Context, profile_step: OneStep | None
) -> tuple[dict[str, Any], float, NumberFormat]:
    """Train. Returns the cells of a row, the seconds of a step, and the number format in which the blocks compute."""
    with tempfile.TemporaryDirectory() as folder:
        more = int(profile_step is not None)
        recipe = recipe_for(subject, changes, context.small, Path(folder))
        if recipe.training.engine == "lightning":  # which has to end by itself
            length = f"training.duration={sum_of_steps(context.small) + more}ba"
            recipe = recipe_for(subject, [*changes, length], context.small, Path(folder))
        wait, warnings = Wait(), Warnings()
        watching = [wait] if profile_step is None else [wait, profile_step]
        steady = Steady(*steps_of(context.small), more=more)
        with made_on(context.device), warnings:
            if recipe.training.engine == "lightning":
                model = train_under_lightning(recipe, [*watching, steady])
            else:
                trainer = build_trainer(recipe)
                trainer.state.callbacks += watching
                run_until(trainer, steady)
                model = trainer.state.model
        rates = sorted(rate * subject.per_sample for rate in steady.rates)
        values: dict[str, Any] = {subject.unit: round(statistics.median(rates), 1)}
        values |= {"range": f"{rates[0]:,.1f} to {rates[-1]:,.1f}", RELATIVE: ""}
        if context.device.type == "cuda":
            values |= {"peak GB": round(steady.peak / 1e9, 1)}
        flops = 3 * forward_flops(recipe)
        achieved = flops * values[subject.unit] / subject.per_sample
        precision = "amp_bf16" if recipe.training.precision == "auto" else recipe.training.precision
        number_format = number_format_of(model, precision)
        on_gpu = context.device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(), number_format) if on_gpu else None
        values |= {"TFLOP/s": round(achieved / 1e12, 4 if context.small else 1)}
        values |= {"MFU": f"{achieved / peak:.1%}" if peak else "", "s to the second step": round(wait.seconds, 1)}
        graphs, breaks = compiler_counts()
        values |= {"graphs": graphs, "graph breaks": breaks, "loss": round(steady.losses[-1], 4)}
        values |= {"warnings": "; ".join(warnings.found)[:300]}
        seconds = recipe.training.global_batch * subject.per_sample / values[subject.unit]
        return values, seconds, number_format


def train_under_lightning(recipe: Recipe, measurements: list[ComposerCallback]) -> Task:
    """Train to the end of the run. Returns the model."""
    from recipes.engines.lightning.trainer import build_trainer  # all else can be measured without Lightning

    watching = UnderLightning(measurements)
    trainer = build_trainer(recipe, lambda parts: parts.callbacks.update(measured=watching))
    trainer.fit()
    trainer.close()
    return trainer.parts.task


@contextlib.contextmanager
def made_on(device: torch.device) -> Iterator[None]:
    """Initial weights are drawn on the device, which takes less than a second instead of ten."""
    build = first_weights.build

    def on_device(component: Any, **context: Any) -> Any:
        try:
            with device:
                return build(component, **context)
        except RuntimeError as error:  # a model that draws with a generator of the CPU, say
            log.info(f"weights are made on the CPU: {error}")
            return build(component, **context)

    first_weights.build = on_device
    try:
        yield
    finally:
        first_weights.build = build


class Warnings(logging.Handler):
    """What the compiler warns of, such as running out of recompilations and going on uncompiled."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line of a message."""
        line = record.getMessage().strip().split("\n")[0][:120]
        if line not in self.found:
            self.found.append(line)

    def __enter__(self) -> None:
        logging.getLogger("torch._dynamo").addHandler(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("torch._dynamo").removeHandler(self)


def compiler_counts() -> tuple[int, int]:
    """Graphs that dynamo has compiled in this process, and the places where it left compiled code."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def forward_flops(recipe: Recipe) -> float:
    """FLOPs of the forward pass of one sample."""
    task: Task = build_on_meta(recipe.model)
    known = task.forward_flops()
    if known is not None:
        return known
    return unet_flops(task.denoiser, recipe.data.args["resolution"] // REDUCTION)
