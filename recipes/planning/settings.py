"""Ways to train a recipe on some devices: how it is divided, its microbatch, and whether activations are recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from data.cost import FLOAT, Plan
from recipes.config.build import build
from recipes.config.recipe import FSDP, Recipe
from recipes.models.task import Task
from recipes.planning.costs import Costs, costs_of
from recipes.planning.devices import Devices
from recipes.planning.footprint import gathered_sizes, gradient_traffic
from recipes.planning.gpus import Device, Shares
from recipes.planning.step_time import BACKWARD_PASSES, LAUNCH, UPDATE_BYTES, StepTime, message_seconds, pass_times
from recipes.planning.trace import Traces

# Of a device's memory: the rest is taken by CUDA, by workspaces of kernels and by fragments. Not measured here.
USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, by part.

    Attributes:
        state: weights, gradients and the optimizer's state.
        working: 16-bit weights, gathered ones under FSDP.
        buckets: in which DDP averages gradients.
        algorithms: of the recipe, such as an average.
        activations: that a microbatch keeps for its backward pass.
    """

    state: float
    working: float
    buckets: float
    algorithms: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Setting:
    """One way to train, with what it takes.

    Attributes:
        division: DDP, or a strategy of FSDP with its replicas.
        microbatch: samples per pass.
        recompute: whether activations are recomputed.
        memory: on each device.
        time: of a step.
    """

    division: str
    microbatch: int
    recompute: bool
    memory: Memory
    time: StepTime

    def __str__(self) -> str:
        return f"{self.division}, microbatch {self.microbatch}{', recomputing' if self.recompute else ''}"

    def fits(self, device: Device) -> bool:
        """Whether a device has the memory."""
        return self.memory.total <= USABLE * device.memory


@dataclass(frozen=True)
class Place:
    """Where a recipe is to be trained.

    Attributes:
        device: its kind.
        peak: FLOP/s by the data sheet.
        shares: of the data sheet's rates that are reached.
        world: number of devices.
        machine: devices of a machine.
    """

    device: Device
    peak: float
    shares: Shares
    world: int
    machine: int


DIVISIONS: dict[str, FSDP | None] = {
    "DDP": None,
    "SHARD_GRAD_OP": FSDP(strategy="SHARD_GRAD_OP", sync="batch"),
    "FULL_SHARD": FSDP(strategy="FULL_SHARD"),
    "FULL_SHARD within machines": FSDP(strategy="FULL_SHARD", replicas="machines"),
}


def settings_of(recipe: Recipe, task: Task, traces: Traces, place: Place) -> Iterator[Setting]:
    """All ways to train a recipe, whether they fit or not. Those that the recipe's algorithms refuse are left out.

    Args:
        recipe: checked.
        task: on the meta device.
        traces: of the task.
        place: where.

    Raises:
        ValueError: the batch does not divide over the devices, or the recipe has tensor parallel groups.
    """
    if recipe.training.tensor_parallel > 1:
        raise ValueError("training.tensor_parallel: the planner knows only FSDP and DDP; give 1, or use --dry-run")
    batch = recipe.training.device_batch(place.world)
    for name, fsdp in DIVISIONS.items():
        if place.world == 1 and fsdp is not None:
            continue
        if fsdp is not None and fsdp.replicas == "machines" and place.world <= place.machine:
            continue
        training = dataclasses.replace(recipe.training, fsdp=fsdp)
        divided = dataclasses.replace(recipe, training=training)
        try:
            replicas = place.world if fsdp is None else fsdp.replicas_in(place.world, min(place.machine, place.world))
            devices = Devices(place.world, replicas)
            costs = costs_of(divided, plan_of(task, devices, recipe.output))
        except ValueError:
            continue
        for microbatch in _microbatches(batch):
            for recompute in (False, True):
                memory = _memory(divided, task, traces, costs, devices, microbatch, batch, recompute)
                time = _time(divided, task, traces, costs, devices, place, microbatch, batch, recompute)
                yield Setting(name, microbatch, recompute, memory, time)


def best_of(settings: list[Setting], device: Device) -> Setting | None:
    """The fastest setting that fits; among those within 1%, the one that takes the least memory."""
    fitting = [setting for setting in settings if setting.fits(device)]
    if not fitting:
        return None
    fastest = min(setting.time.total for setting in fitting)
    return min((s for s in fitting if s.time.total <= 1.01 * fastest), key=lambda s: s.memory.total)


def plan_of(task: Task, devices: Devices, output: str) -> Plan:
    """What components are told of a run to say what they cost."""
    return Plan(
        task=task,
        parameters=sum(p.numel() for p in task.parameters()),
        trained=sum(p.numel() for p in task.parameters() if p.requires_grad),
        replicas=devices.replicas,
        shards=devices.shards,
        output=output,
        averaged=False,
        build=build,
    )


def _microbatches(batch: int) -> list[int]:
    """Powers of two up to the batch of a device, and that batch."""
    return sorted({2**n for n in range(int(math.log2(batch)) + 1)} | {batch})


def _counts(task: Task) -> tuple[int, int]:
    return (
        sum(p.numel() for p in task.parameters()),
        sum(p.numel() for p in task.parameters() if p.requires_grad),
    )


def _memory(
    recipe: Recipe,
    task: Task,
    traces: Traces,
    costs: Costs,
    devices: Devices,
    microbatch: int,
    batch: int,
    recompute: bool,
) -> Memory:
    parameters, trained = _counts(task)
    fsdp = recipe.training.fsdp
    halves = 2 * costs.stored_16_bit
    state = (FLOAT * (parameters + trained) - 2 * halves) / devices.shards + costs.optimizer.device_bytes
    trace = traces.at(microbatch)
    activations = trace.inputs + trace.largest + trace.outside if recompute else trace.kept
    passes = -(-batch // microbatch)
    if fsdp is None:
        # Autocast keeps 16-bit weights for the length of a pass, or `working_weights` for that of a step.
        working = 2.0 * (parameters - costs.stored_16_bit)
        buckets = FLOAT * trained * (devices.world > 1 and passes > 1)
    else:
        sizes = gathered_sizes(recipe, task, costs, devices)
        # One unit computes while the next one is gathered.
        working = sum(sizes) if fsdp.strategy == "SHARD_GRAD_OP" else 2 * max(sizes)
        buckets = FLOAT * parameters * (fsdp.sync == "batch" and passes > 1)
    return Memory(
        state, working, buckets, sum(c.device_bytes for c in costs.algorithms.values()), activations
    )


def _time(
    recipe: Recipe,
    task: Task,
    traces: Traces,
    costs: Costs,
    devices: Devices,
    place: Place,
    microbatch: int,
    batch: int,
    recompute: bool,
) -> StepTime:
    passes = batch / microbatch
    trace = traces.at(microbatch)
    compute, traffic, gaps = pass_times(trace, place.device, place.peak, place.shares, recompute)
    _, trained = _counts(task)
    update = UPDATE_BYTES * trained / devices.shards / (place.shares.memory * place.device.bandwidth)
    within, between = _sent(recipe, task, costs, devices, math.ceil(passes))
    messages = message_seconds(
        within, between, devices.shards, devices.replicas, place.machine, place.device, place.shares
    )
    host = LAUNCH * len(trace.operations) * (BACKWARD_PASSES + 1 + recompute) * passes
    return StepTime(passes * compute, passes * traffic, update, passes * gaps, messages, host)


def _sent(recipe: Recipe, task: Task, costs: Costs, devices: Devices, passes: int) -> tuple[float, float]:
    """Bytes that each device sends per step to other shards, and to other replicas."""
    fsdp = recipe.training.fsdp
    within = between = 0.0
    if fsdp is not None and devices.shards > 1:
        reduced = 1 if fsdp.sync == "batch" else passes
        gathered = 2 * passes if fsdp.strategy == "FULL_SHARD" else reduced
        share = (devices.shards - 1) / devices.shards
        weights = sum(gathered_sizes(recipe, task, costs, devices))
        within = share * (gathered * weights + reduced * FLOAT * _counts(task)[0])
    if devices.replicas > 1:
        own = next((c.sent_bytes for c in costs.algorithms.values() if c.sent_bytes is not None), None)
        between = gradient_traffic(task, devices, costs.stored_16_bit) if own is None else own
    return within, between
