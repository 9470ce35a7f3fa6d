"""The ten lines that a training run opens with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from data.cost import Epoch, count_text
from data.loading import Loading
from recipes.config.recipe import Recipe, Training
from recipes.config.values import Component
from recipes.planning.costs import parameter_counts
from recipes.planning.length import batch_text, length_of, length_text

CONFIG = "config.yaml"  # the resolved config, in the folder of the run


def opening(
    recipe: Recipe, task: nn.Module, data: Loading, evals: dict[str, Loading], *, world: int, precision: str
) -> str:
    """The summary that a run prints before it starts. The whole config is in <output>/config.yaml.

    Args:
        recipe: checked.
        task: the model.
        data: training data.
        evals: validation sets by label.
        world: number of devices.
        precision: number format of the run, with "auto" resolved.

    Raises:
        ValueError: an epoch has fewer samples than a batch, a duration is given in epochs of a stream without end, or
            the batch does not divide over the devices.
    """
    training = recipe.training
    parameters, trained = parameter_counts(task)
    incomplete = not recipe.data.args.get("drop_last", True)
    epoch = Epoch(data.samples, incomplete, endless=data.samples is None)
    length = length_of(recipe, epoch, world // training.tensor_parallel)
    lines = {
        "run": f"{recipe.run_name}, engine {training.engine}",
        "model": f"{recipe.model.name}, {parameters:,} parameters, {trained:,} of them trained",
        "data": "; ".join(_data_texts(recipe, data, evals)),
        "batch": batch_text(training, world),
        "precision": f"{precision}, {_sharding_text(training, world)}",
        "optimizer": _optimizer_text(recipe.optimizer, recipe.schedule, training.grad_clip),
        "algorithms": ", ".join(algorithm.name for algorithm in recipe.algorithms.values()) or "none",
        "length": length_text(recipe, length),
        "checkpoints": _checkpoints_text(recipe),
        "config": f"{Path(recipe.output, CONFIG)} (--print-config prints it)",
    }
    return "\n".join(f"{name + ':':13}{text}" for name, text in lines.items())


def _data_texts(recipe: Recipe, data: Loading, evals: dict[str, Loading]) -> Iterable[str]:
    size = "a stream without end" if data.samples is None else f"{count_text(data.samples, 'sample')} per epoch"
    yield f"{recipe.data.name}, {size}"
    for label, loading in evals.items():
        samples = "" if loading.samples is None else f", {count_text(loading.samples, 'sample')}"
        yield f"validation {label}{samples}"


def _sharding_text(training: Training, world: int) -> str:
    fsdp, devices = training.fsdp, training.tensor_parallel
    divided = "" if devices == 1 else f"tensor parallel over {devices} devices"
    if fsdp is None:
        return divided or ("one device" if world == 1 else "DDP")
    return f"FSDP2 {fsdp.strategy}, replicas: {fsdp.replicas}" + (f", {divided}" if divided else "")


def _optimizer_text(optimizer: Component, schedule: Component, grad_clip: float | None) -> str:
    rate = f" at {optimizer.args['lr']:g}" if "lr" in optimizer.args else ""
    clip = "" if grad_clip is None else f", gradient norm clipped at {grad_clip:g}"
    return f"{optimizer.name}{rate}, schedule {schedule.name}{clip}"


def _checkpoints_text(recipe: Recipe) -> str:
    checkpoints = recipe.checkpoints
    start = None if recipe.goes_on() else checkpoints.load_path or checkpoints.load_weights
    begins = f"; starts from {start}" if start else ""
    if not checkpoints.save:
        return f"none; output in {recipe.output}{begins}"
    every = f"every {checkpoints.every}" if checkpoints.every else "at the end"
    if checkpoints.minutes is not None:
        every += f", and after {checkpoints.minutes:g} minutes without one"
    kept = "all kept" if checkpoints.keep == -1 else f"the newest {checkpoints.keep} kept"
    resume = "" if checkpoints.autoresume else ", begun anew at each start"
    return f"{every}, {kept}{resume}, in {recipe.output}/checkpoints{begins}"
