"""What a run refuses before its first batch, found without data, devices or memory for weights.

Dry runs build what a run builds, on the meta device, and let the levers change the model. So they refuse what the run
would refuse, in its words, and no check is written twice.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sharding.first_rank import loose_tensors
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.config.build import build, build_on_meta
from recipes.config.recipe import Recipe
from recipes.config.values import Component, plain_values
from recipes.engines.check_classes import check_classes
from recipes.engines.check_optimizers import check_kept, check_step
from recipes.engines.first_weights import load_first_weights
from recipes.engines.parts import Place, build_levers, check_microbatch, context_of, keeps, the_one
from recipes.engines.precision import resolve
from recipes.engines.resuming import check_folder, check_start
from recipes.models.task import Task
from recipes.planning.devices import Devices
from recipes.planning.dry_run import survey
from recipes.planning.length import in_epochs
from recipes.training.clock import Clock
from recipes.training.lever import Lever
from recipes.training.run import Precision, Run
from recipes.training.schedules import checked


def check_on_meta(recipe: Recipe) -> None:
    """Build what needs no data, and prepare the model for training: what `survey` checks, and the rest of a start.

    Where the recipe leaves the choice between GPU and CPU to the machine, it must be right for one of them.

    Raises:
        ValueError: what the run would refuse.
    """
    check_folder(recipe, recipe.training.engine)
    found = survey(recipe)
    weights = recipe.checkpoints.load_weights
    if weights and Path(weights).exists() and not recipe.goes_on():  # as the run itself
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            load_first_weights(recipe, found.task)
    kinds = {"auto": (True, False), "gpu": (True,), "cpu": (False,)}[recipe.training.device]
    errors = []
    with _quiet():
        for use_gpu in kinds:
            try:
                return _check_on_meta(recipe, use_gpu, found.length.epoch_steps)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def _check_on_meta(recipe: Recipe, use_gpu: bool, epoch_batches: int | None) -> None:
    training = recipe.training
    devices = Devices.of_environment(training)
    place = Place(use_gpu, resolve(training.precision, use_gpu=use_gpu), local_world_size=1, planned=devices)
    task = build_on_meta(recipe.model)
    context = context_of(recipe, task, None)
    run = _new_run(recipe, place, task, devices, epoch_batches)
    check_start(recipe, task, type(run.optimizer).__name__)
    batch = training.device_batch(devices.world)
    levers = build_levers(recipe, place, context, batch)
    low_rank = the_one(levers, PowerSGD)
    if low_rank is not None and "WORLD_SIZE" in os.environ:
        low_rank.check_replicas(devices.replicas)
    context |= {"average": the_one(levers, ScheduledEMA), "scaling": the_one(levers, ResblockGradScaling)}
    schedule = checked(build(recipe.schedule), recipe.schedule.name)
    for component in (*recipe.callbacks.values(), *recipe.loggers.values()):
        if not any(isinstance(value, Component) for value in component.args.values()):  # which has data of its own
            build(component, **context)
    check_classes(recipe)
    check_microbatch(recipe, task, batch)
    _prepare(recipe, levers, run, devices)
    if epoch_batches is None and any(in_epochs(plain_values(recipe))):
        return  # only the data says which lengths fit each other
    schedule(run.clock)
    for lever in levers:
        lever.check_run(run)


def levers_on_gpus(recipe: Recipe, devices: Devices, task: Task) -> list[Lever]:
    """The levers of a run on some GPUs, which change nothing yet.

    Raises:
        ValueError: what the run would refuse: levers that cannot work with each other, or with the `training` section.
    """
    batch = recipe.training.device_batch(devices.world)
    return build_levers(recipe, _gpus(recipe, devices), context_of(recipe, task, None), batch)


def check_levers_on_meta(recipe: Recipe, epoch_batches: int | None) -> None:
    """Let a recipe's levers change its model, as in a run on no more GPUs than hold one model.

    Args:
        recipe: checked.
        epoch_batches: steps of an epoch; None: not known.

    Raises:
        ValueError: what any run of the recipe would refuse of its levers.
    """
    tensor = recipe.training.tensor_parallel
    devices, task = Devices(tensor, 1, tensor), build_on_meta(recipe.model)
    with _quiet():
        levers = levers_on_gpus(recipe, devices, task)
        run = _new_run(recipe, _gpus(recipe, devices), task, devices, epoch_batches)
        _prepare(recipe, levers, run, devices)
        if epoch_batches is not None or not any(in_epochs(plain_values(recipe))):
            for lever in levers:
                lever.check_run(run)


def _gpus(recipe: Recipe, devices: Devices) -> Place:
    return Place(True, resolve(recipe.training.precision, use_gpu=True), local_world_size=1, planned=devices)


def _new_run(recipe: Recipe, place: Place, task: Task, devices: Devices, epoch_batches: int | None) -> MetaRun:
    # One value stands for each parameter, which has no memory. Some optimizers divide matrices from vectors.
    own = {name: p for name, p in task.named_parameters() if p.requires_grad}
    stand_ins = {name: nn.Parameter(torch.zeros([1] * p.ndim)) for name, p in own.items()}
    optimizer = build(recipe.optimizer, parameters=list(stand_ins.values()), task=task)
    check_step(optimizer, on_cpu=not place.use_gpu)
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # It may take some or all parameters of the task itself, as for groups by their names.
    trained = {name: p if id(p) in taken else stand_ins[name] for name, p in own.items()}
    divided = devices.world > 1 and (recipe.training.fsdp is not None or devices.tensor > 1)
    check_kept(optimizer, trained, keeps(recipe), divided)
    run = MetaRun(task, place.precision, optimizer, Clock(0, 0, 0, recipe.training.duration, epoch_batches))
    run.on_cpu = not place.use_gpu
    return run


def _prepare(recipe: Recipe, levers: list[Lever], run: MetaRun, devices: Devices) -> None:
    """What levers change before training begins, in the order of a run."""
    for lever in levers:
        lever.change_modules(run)
    if devices.world > 1 and (recipe.training.fsdp is not None or devices.tensor > 1):
        loose_tensors(run.task)  # which the first rank would send
    for lever in levers:
        lever.compile(run)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which levers do not log what they have changed."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


class MetaRun(Run):
    """A run at its start, on the meta device. Nothing is trained or logged."""

    on_cpu = False  # as the recipe asks for, see `_new_run`

    def __init__(self, task: Task, precision: Precision, optimizer: torch.optim.Optimizer, clock: Clock) -> None:
        self.task = self.module = task
        self.device = torch.device("meta")
        self.precision = precision
        self.optimizer = optimizer
        self.clock = clock

    def autocast(self) -> AbstractContextManager:
        return nullcontext()

    def gradient_scale(self) -> float:
        return 1.0

    def new_parameters(self) -> AbstractContextManager:
        return nullcontext()

    def peak_rates_changed(self) -> None:
        """Does nothing: there is no schedule."""

    def set_microbatch(self, samples: int) -> None:
        """Does nothing: there are no batches."""

    def log(self, figures: Mapping[str, float]) -> None:
        """Does nothing: there are no loggers."""

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Does nothing: there are no loggers."""

    def log_images(self, name: str, images: np.ndarray) -> None:
        """Does nothing: there are no loggers."""
