"""What a training run would do: sizes and counts, with no memory for weights and nothing read but manifests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - imported later, inside of the meta device's mode, it fails

from data.bpe import Vocabulary
from data.manifest import NAME as MANIFEST
from data.manifest import Manifest
from data.text_requirements import check_text
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, Training, to_yaml
from recipes.config.schema import read_signature
from recipes.config.values import Component
from recipes.planning.footprint import (
    FLOAT,
    Devices,
    average_lines,
    average_of,
    gigabytes,
    left_over,
    left_over_lines,
    memory_text,
    moments,
    traffic_lines,
)


@dataclass(frozen=True)
class Length:
    """How long a run is; None where the size of its data is not known.

    Attributes:
        steps: optimizer steps.
        epoch_steps: optimizer steps an epoch.
        batch: samples a step, over all devices.
    """

    steps: int | None
    epoch_steps: int | None
    batch: int

    def steps_in(self, duration: str) -> float | None:
        """A duration in optimizer steps."""
        number, unit = re.fullmatch(r"([\d.]+)(\w+)", duration).groups()
        steps = {"ba": 1.0, "sp": 1 / self.batch, "ep": self.epoch_steps, "dur": self.steps}[unit]
        return None if steps is None else float(number) * steps

    def times(self, every: str | None) -> int | None:
        """How often something happens that is due at an interval and at the end of the run."""
        if every is None:
            return 1
        interval = self.steps_in(every)
        if interval is None or self.steps is None:
            return None
        return max(1, min(self.steps, math.ceil(round(self.steps / interval, 6))))


def report(recipe: Recipe, missing: list[str]) -> str:
    """The resolved config, the model's size, and what the run would read and write, as text.

    Args:
        recipe: checked.
        missing: input paths that do not exist, each a line that names its key.

    Raises:
        ValueError: a model that cannot be built, a batch that does not divide, a manifest that does not fit.
    """
    task = build_on_meta(recipe.model)
    total = sum(p.numel() for p in task.parameters())
    trainable = sum(p.numel() for p in task.parameters() if p.requires_grad)
    sizes = {
        label: data_samples(component, task.requirements())
        for label, component in {"": recipe.data, **recipe.evals}.items()
    }
    length = run_length(recipe, sizes.pop(""))
    devices = Devices.of_environment(recipe.training)
    state = FLOAT * total + moments(recipe, task).size
    errors = left_over(recipe, task)
    average = FLOAT * trainable if average_of(recipe) else 0
    second = FLOAT * total if average and hasattr(task, "export_average") else 0
    lines = [
        to_yaml(recipe),
        f"model: {recipe.model.name}, {total:,} parameters, {trainable:,} of them trained",
        memory_text(recipe, task, state + FLOAT * trainable, devices),
        *left_over_lines(recipe, errors, devices),
        *average_lines(recipe, average, devices),
        f"batch: {batch_text(recipe.training, devices.world)}",
        *traffic_lines(recipe, task, devices),
        f"run: {run_text(recipe.training.duration, length)}",
        *evals_lines(recipe, sizes, length),
        checkpoints_text(recipe, state + FLOAT * errors, average, length),
        *callback_lines(recipe, FLOAT * total, second, length),
        *(f"missing: {path}" for path in missing),
    ]
    return "\n".join(lines)


def run_length(recipe: Recipe, samples: int | None) -> Length:
    """Optimizer steps of a recipe whose data has so many samples an epoch."""
    batch = recipe.training.global_batch
    epoch_steps = None
    if samples is not None:
        drop_last = recipe.data.args.get("drop_last", True)
        epoch_steps = samples // batch if drop_last else math.ceil(samples / batch)
        if epoch_steps == 0:
            raise ValueError(f"training.global_batch: {batch} is more than the {samples} samples of an epoch")
    steps = Length(None, epoch_steps, batch).steps_in(recipe.training.duration)
    return Length(None if steps is None else math.ceil(steps), epoch_steps, batch)


def data_samples(component: Component, requirements: dict[str, Any]) -> int | None:
    """Samples of an epoch by the manifests that lie on this machine; None where one does not, or there is none.

    Raises:
        ValueError: a manifest or a vocabulary that does not fit the recipe.
    """
    if component.name not in ("latents", "tokens"):
        return None
    if component.name == "tokens":
        default = read_signature(component.target).parameters["positions"].default
        vocabulary = Path(component.args["vocabulary"])
        found = Vocabulary.read(vocabulary) if vocabulary.is_file() else None
        requirements = check_text(requirements, component.args.get("positions", int(default)), found)
    total: float | None = 0.0
    for stream in component.args["streams"].values():
        folder = Path(stream.args.get("path") or stream.args["cache"])
        if not (folder / MANIFEST).is_file():
            total = None
            continue
        manifest = Manifest.read(folder)
        resolution = component.args["resolution"]
        manifest.check(
            kind=component.name, resolution=resolution, **requirements, **(component.args.get("expect") or {})
        )
        if total is not None:
            repeat = stream.args.get("repeat")
            total += manifest.samples * (1.0 if repeat is None else repeat)
    return component.args.get("epoch_size") or (None if total is None else int(total))


def batch_text(training: Training, world: int) -> str:
    """How the global batch is divided over devices and microbatches."""
    each = training.device_batch(world)
    text = f"{training.global_batch:,} samples a step over {plural(world, 'device')} (WORLD_SIZE), {each:,} on each"
    if training.microbatch == "auto":
        return f"{text}, in microbatches as large as the memory takes"
    microbatch = min(training.microbatch or each, each)
    count = math.ceil(each / microbatch)
    last = each - (count - 1) * microbatch
    rest = f", the last of {last:,}" if last != microbatch else ""
    return f"{text}, in {plural(count, 'microbatch', 'microbatches')} of {microbatch:,}{rest}"


def run_text(duration: str, length: Length) -> str:
    """Steps, samples and epochs."""
    if length.steps is None:
        return f"{duration}; how many steps that is depends on data that does not lie here or has no manifest"
    text = f"{plural(length.steps, 'step')}, {plural(length.steps * length.batch, 'sample')}"
    if length.epoch_steps is None:
        return text
    return f"{text}, {length.steps / length.epoch_steps:,.2f} epochs of {plural(length.epoch_steps, 'step')}"


def evals_lines(recipe: Recipe, sizes: dict[str, int | None], length: Length) -> Iterable[str]:
    """A line a validation set."""
    for label, samples in sizes.items():
        size = "" if samples is None else f" over {plural(samples, 'sample')}"
        yield f"validation {label}: {often(recipe.training.eval_every, length)}{size}"


def checkpoints_text(recipe: Recipe, state: int, average: int, length: Length) -> str:
    """How many checkpoints of which size, those at the end with the average of the weights where there is one."""
    checkpoints = recipe.checkpoints
    if not checkpoints.save:
        return "checkpoints: none"
    written = length.times(checkpoints.every)
    kept = written if checkpoints.keep == -1 else min(checkpoints.keep, written or checkpoints.keep)
    disk = "" if kept is None else f", {kept} kept ({gigabytes(kept * (state + average))})"
    late = f", {gigabytes(state + average)} with the average" if average else ""
    return (
        f"checkpoints: {often(checkpoints.every, length)}, about {gigabytes(state)} each{late}{disk}, "
        f"in {recipe.output}/checkpoints"
    )


def callback_lines(recipe: Recipe, weights: int, second: int, length: Length) -> Iterable[str]:
    """A line for each callback that writes files.

    Args:
        recipe: whose callbacks.
        weights: bytes of an export.
        second: bytes that averaged weights add to it.
        length: of the run.
    """
    for label, callback in recipe.callbacks.items():
        when = often(callback.args.get("every"), length)
        if callback.name in ("sample_grid", "token_grid"):
            count = len(callback.args["prompts"])
            yield f"callbacks.{label}: {when}, a grid of {plural(count, 'picture')}, in {recipe.output}/samples"
        elif callback.name == "reconstructions":
            yield f"callbacks.{label}: {when}, a grid of pictures, in {recipe.output}/reconstructions"
        elif callback.name == "export":
            both = f", {gigabytes(weights + second)} with the averaged ones" if second else ""
            yield f"callbacks.{label}: {when}, {gigabytes(weights)} of weights{both}, in {recipe.output}/export"


def often(every: str | None, length: Length) -> str:
    """How often, in words."""
    if every is None:
        return "once, at the end"
    count = length.times(every)
    return f"every {every}" if count is None else f"{plural(count, 'time')}, every {every}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
