"""What a training run would do: sizes and counts. No memory is taken for weights, and only manifests are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch._dynamo  # noqa: F401 - it must be imported before the meta device is the default one
from torch import nn

from data.cost import Epoch, size_text
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe
from recipes.planning.check_model import check_model
from recipes.planning.costs import Costs, cost_of, costs_of, plan_of
from recipes.planning.devices import Devices
from recipes.planning.footprint import (
    algorithm_lines,
    full_checkpoint_lines,
    memory_text,
    start_lines,
    traffic_lines,
)
from recipes.planning.inputs import absent_inputs
from recipes.planning.length import Length, batch_text, length_of, length_text, times_text
from recipes.planning.tensor_parallel import check_tensor_parallel


@dataclass(frozen=True)
class Survey:
    """What can be known of a run before it starts.

    Attributes:
        task: the model, without memory for weights.
        parameters: number of them.
        trained: number of those that are trained.
        devices: of the run.
        costs: of its components.
        length: of the run.
    """

    task: nn.Module
    parameters: int
    trained: int
    devices: Devices
    costs: Costs
    length: Length


def survey(recipe: Recipe) -> Survey:
    """Build the model of a checked recipe without memory for weights, and add up what the run takes.

    Raises:
        ValueError: a model that cannot be built or sharded, a batch that does not divide, a manifest that does not fit.
    """
    task = build_on_meta(recipe.model)
    devices = Devices.of_environment(recipe.training)
    check_tensor_parallel(recipe, devices, task)
    check_model(recipe, task)
    plan = plan_of(recipe, task, devices)
    costs = costs_of(recipe, plan)
    length = length_of(recipe, costs.data.epoch or Epoch(None), devices.world // devices.tensor)
    return Survey(task, plan.parameters, plan.trained, devices, costs, length)


def problems(recipe: Recipe, whole: Callable[[Recipe], Any] = survey) -> Iterator[str]:
    """Everything that keeps a run from starting, where `survey` and the run itself stop at the first.

    Args:
        recipe: checked.
        whole: the last check, if nothing else is wrong; it raises ValueError.
    """
    errors: dict[str, None] = {}  # in order, each once

    def attempt(act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except (ValueError, FileNotFoundError) as error:
            errors[str(error)] = None
            return None

    devices = attempt(Devices.of_environment, recipe.training)
    if devices is not None:
        attempt(batch_text, recipe.training, devices.world)
    task = attempt(build_on_meta, recipe.model)
    if task is not None:
        attempt(check_model, recipe, task)
    if task is not None and devices is not None:
        attempt(check_tensor_parallel, recipe, devices, task)
        plan = attempt(plan_of, recipe, task, devices)
        if plan is not None:
            others = (recipe.optimizer, *recipe.algorithms.values(), *recipe.callbacks.values())
            for component in (recipe.data, *others):
                attempt(cost_of, component, plan)
            for component in recipe.evals.values():
                attempt(cost_of, component, dataclasses.replace(plan, training=False))
        if not errors:
            attempt(whole, recipe)
    yield from errors


def describe_run(recipe: Recipe, missing: list[str]) -> str:
    """A text with the size of the model and what the run would read, send and write.

    Args:
        recipe: checked.
        missing: input paths that do not exist, one line each that names its key.

    Raises:
        ValueError: as `survey`, and as `absent_inputs`.
    """
    found = survey(recipe)
    task, devices, costs, length = found.task, found.devices, found.costs, found.length
    lines = [
        f"model: {recipe.model.name}, {found.parameters:,} parameters, {found.trained:,} of them trained",
        memory_text(recipe, task, costs, devices),
        *start_lines(task, devices),
        *(f"optimizer: {line}" for line in costs.optimizer.lines),
        *algorithm_lines(costs),
        f"batch: {batch_text(recipe.training, devices.world)}",
        *traffic_lines(recipe, task, costs, devices),
        f"run: {length_text(recipe, length)}",
        *evals_lines(recipe, costs, length),
        checkpoints_text(recipe, costs.checkpoint_bytes(found.parameters), costs.averaged_bytes, length),
        *full_checkpoint_lines(recipe, costs.checkpoint_bytes(found.parameters) + costs.averaged_bytes, devices),
        *callback_lines(costs, length),
        *(f"missing: {path}" for path in absent_inputs(recipe, missing)),
    ]
    return "\n".join(lines)


def disk_bytes(recipe: Recipe, found: Survey) -> int:
    """Bytes that the checkpoints and exports of a run take at the same time; one checkpoint more than are kept exists
    for a moment."""
    checkpoints = recipe.checkpoints
    written = found.length.times(checkpoints.every) or 1
    if checkpoints.minutes is not None and checkpoints.keep != -1:  # a slow run writes more
        written = max(written, checkpoints.keep + 1)
    held = written if checkpoints.keep == -1 else min(checkpoints.keep + 1, written)
    exports = sum(cost.files.held for cost in found.costs.callbacks.values() if cost.files is not None)
    size = found.costs.checkpoint_bytes(found.parameters) + found.costs.averaged_bytes
    return held * size * checkpoints.save + exports


def evals_lines(recipe: Recipe, costs: Costs, length: Length) -> Iterable[str]:
    """One line per validation set."""
    for label, cost in costs.evals.items():
        samples = cost.epoch.samples if cost.epoch else None
        size = "" if samples is None else f", over {samples:,} samples"
        yield f"validation {label}: {times_text(recipe.training.eval_every, length)}{size}"


def checkpoints_text(recipe: Recipe, size: int, averaged: int, length: Length) -> str:
    """How many checkpoints are written, how large they are, and how many are kept.

    Args:
        recipe: defines when checkpoints are written.
        size: bytes of a checkpoint.
        averaged: bytes that averaged weights add to it once the average has begun; 0: there is none.
        length: of the run.
    """
    checkpoints = recipe.checkpoints
    if not checkpoints.save:
        return "checkpoints: none"
    written = length.times(checkpoints.every)
    kept = written if checkpoints.keep == -1 else min(checkpoints.keep, written or checkpoints.keep)
    least = ""
    if checkpoints.minutes is not None:  # a slow run writes more
        kept, least = (kept, "at least ") if checkpoints.keep == -1 else (checkpoints.keep, "")
    disk = "" if kept is None else f", {least}{kept} kept ({size_text(kept * (size + averaged))})"
    late = f", {size_text(size + averaged)} with the average" if averaged else ""
    limit = "" if checkpoints.minutes is None else f", and after {checkpoints.minutes:g} minutes without one"
    return (
        f"checkpoints: {times_text(checkpoints.every, length)}{limit}, about {size_text(size)} each{late}{disk}, "
        f"in {recipe.output}/checkpoints"
    )


def callback_lines(costs: Costs, length: Length) -> Iterable[str]:
    """What each callback writes, and its other notes."""
    for label, cost in costs.callbacks.items():
        if cost.files is not None:
            times = times_text(cost.files.every, length)
            yield f"callbacks.{label}: {times}, {cost.files.what}, in {cost.files.folder}"
        yield from (f"callbacks.{label}: {line}" for line in cost.lines)
