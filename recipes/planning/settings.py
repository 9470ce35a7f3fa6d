"""Ways to train a recipe on some devices: how it is divided, its microbatch, and whether activations are recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from recipes.algorithms.modules.compile import GRAPH_MODES, Compile
from recipes.algorithms.sharding.shard import units_of
from recipes.config.recipe import FSDP, Recipe
from recipes.config.values import Component
from recipes.models.task import Task
from recipes.planning.check_model import check_model
from recipes.planning.costs import Costs, costs_of, plan_of
from recipes.planning.devices import Devices
from recipes.planning.divided_run import Cluster, DividedRun, Setting
from recipes.planning.footprint import gathered_format
from recipes.planning.hardware.gpus import Device
from recipes.planning.step_time import captured, share_of_launches
from recipes.planning.tensor_parallel import check_tensor_parallel
from recipes.planning.tracing.pass_memory import Passes
from recipes.planning.tracing.trace import Traces

DIVISIONS: dict[str, FSDP | None] = {
    "DDP": None,
    "SHARD_GRAD_OP": FSDP(strategy="SHARD_GRAD_OP", sync="batch"),
    "FULL_SHARD": FSDP(strategy="FULL_SHARD"),
    "FULL_SHARD within machines": FSDP(strategy="FULL_SHARD", replicas="machines"),
}


# What a run would refuse of the algorithms of a recipe that is divided over devices; see `runs_of`.
Check = Callable[[Recipe, Devices, Task], object]


def no_check(recipe: Recipe, devices: Devices, task: Task) -> None:
    """A `Check` that refuses nothing."""


def settings_of(runs: Iterable[DividedRun]) -> Iterator[Setting]:
    """All settings of ways to divide a run, whether they fit or not."""
    for run in runs:
        for microbatch in _microbatches(run.batch):
            for recompute in (False,) if captured(run.recipe.algorithms) else (False, True):
                yield run.setting(microbatch, recompute)


def runs_of(
    recipe: Recipe,
    task: Task,
    traces: Callable[[int], Traces],
    passes: Callable[[int], Passes],
    samples: dict[str, Tensor],
    cluster: Cluster,
    check: Check = no_check,
    left_out: dict[str, str] | None = None,
) -> Iterator[DividedRun]:
    """All ways to divide a recipe over devices. Those that its algorithms refuse are left out.

    Args:
        recipe: checked.
        task: on the meta device.
        traces: gives those of the task, with its matrices divided over a number of devices.
        passes: gives their memory, likewise.
        samples: a batch of any size.
        cluster: on which it is to be trained.
        check: raises ValueError where a run would refuse the algorithms of a way.
        left_out: gets the message of `check` by the name of the way.

    Raises:
        ValueError: the batch does not divide over the devices, the rate of their links is not known, or `check` has
            refused all ways.
    """
    left_out = {} if left_out is None else left_out
    machine = min(cluster.machine, cluster.world)
    cluster.check_links()
    tensors = [n for n in range(1, machine + 1) if machine % n == 0] if task.tensor_plan() else [1]
    ways = 0
    for tensor in tensors:
        for name, fsdp in DIVISIONS.items():
            training = dataclasses.replace(recipe.training, fsdp=fsdp, tensor_parallel=tensor)
            whole = fsdp is None and tensor == 1
            algorithms = recipe.algorithms if whole else _for_parts(recipe.algorithms)
            try:
                batch = training.device_batch(cluster.world)
                devices = Devices.of(training, cluster.world, machine)
                alone = devices.replicas == 1  # then powersgd has nothing to average, and a run refuses it
                averaging = {name for name, lever in algorithms.items() if lever.name == "powersgd" and alone}
                algorithms = {name: lever for name, lever in algorithms.items() if name not in averaging}
                divided = dataclasses.replace(recipe, training=training, algorithms=algorithms)
                check_tensor_parallel(divided, devices, task)
                check_model(divided, task)
                costs = costs_of(divided, plan_of(divided, task, devices))
                _check_one_graph(divided, task, costs)
            except ValueError:
                continue
            # What FSDP would not divide is DDP, and what it divides within one machine only is FULL_SHARD.
            if fsdp is not None and (devices.shards == 1 or (fsdp.replicas == "machines" and devices.replicas == 1)):
                continue
            try:
                check(divided, devices, task)
            except ValueError as error:
                left_out[name if tensor == 1 else f"tensor_parallel {tensor}, {name}"] = str(error)
                continue
            ways += 1
            label = "no FSDP" if fsdp is None and tensor == cluster.world > 1 else name
            if share_of_launches(algorithms) > share_of_launches(recipe.algorithms):
                label += ", without CUDA graphs"
            label += ", without powersgd" if averaging else ""
            found = traces(tensor), passes(tensor)
            yield DividedRun(label, divided, task, *found, costs, devices, cluster, samples, batch)
    if not ways and left_out:
        raise ValueError(next(iter(left_out.values())))
    if not ways:
        _raise_indivisible(recipe, cluster)


def _for_parts(algorithms: Mapping[str, Component]) -> dict[str, Component]:
    """Algorithms as a run takes them where the model is divided: `compile` in another mode, without those for whole
    copies alone."""
    changed = {}
    for label, lever in algorithms.items():
        if lever.name in ("block_all_reduce", "cuda_graphs"):
            continue
        mode = GRAPH_MODES.get(lever.args.get("mode")) if lever.name == "compile" else None
        changed[label] = lever if mode is None else dataclasses.replace(lever, args={**lever.args, "mode": mode})
    return changed


def _check_one_graph(recipe: Recipe, task: Task, costs: Costs) -> None:
    """Raises ValueError where FSDP ends the graph of a module that must be one; see `Compile.check_units`."""
    fsdp = recipe.training.fsdp
    levers = [] if fsdp is None else [lever for lever in recipe.algorithms.values() if lever.name == "compile"]
    for lever in levers:
        low = None if gathered_format(recipe, costs) == "fp32" else torch.bfloat16
        Compile(task, **lever.args).check_units(units_of(task, by_block=fsdp.wrap == "blocks", parameters=low))


def _raise_indivisible(recipe: Recipe, cluster: Cluster) -> None:
    """For a batch that no number of groups divides: say which numbers of devices do."""
    batch = recipe.training.global_batch
    near = [n for n in range(1, 2 * cluster.world + 1) if batch % n == 0]
    fits = {max(n for n in near if n <= cluster.world), *[n for n in near if n > cluster.world][:1]}
    instead = " or ".join(str(n) for n in sorted(fits))
    raise ValueError(
        f"training.global_batch: {batch} does not divide over {cluster.world} devices; the nearest numbers of devices "
        f"that divide it: {instead}"
    )


def best_of(settings: list[Setting], device: Device) -> Setting | None:
    """The fastest setting that fits; among those within 1%, the one that sends the least, as not all messages may
    overlap with the work, and of these the one that takes the least memory."""
    fitting = [setting for setting in settings if setting.memory.fits(device)]
    if not fitting:
        return None
    fastest = min(setting.time.total for setting in fitting)
    near = [setting for setting in fitting if setting.time.total <= 1.01 * fastest]
    least = min(setting.time.messages for setting in near)
    return min((s for s in near if s.time.messages <= least + 0.01 * fastest), key=lambda s: s.memory.total)


def _microbatches(batch: int) -> list[int]:
    """Powers of two up to the batch of a device, and that batch."""
    return sorted({2**n for n in range(int(math.log2(batch)) + 1)} | {batch})
