"""Ways to train a recipe on some devices: how it is divided, its microbatch, and whether activations are recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from data.cost import FLOAT
from recipes.algorithms.modules.compile import GRAPH_MODES, Compile
from recipes.algorithms.sharding.shard import units_of
from recipes.config.recipe import FSDP, Recipe
from recipes.config.values import Component
from recipes.models.task import Task
from recipes.planning.batches import batch_bytes
from recipes.planning.costs import Costs, costs_of, parameter_counts, plan_of
from recipes.planning.devices import Devices
from recipes.planning.footprint import gathered_format, gathered_sizes, replica_traffic, shard_traffic, state_bytes
from recipes.planning.gpus import Device, Shares
from recipes.planning.pass_memory import Passes
from recipes.planning.sharding import check_sharding
from recipes.planning.step_time import (
    BY_BLOCK,
    BY_DDP,
    CAPTURED,
    COMPILED,
    LAUNCH,
    UPDATE_BYTES,
    StepTime,
    message_seconds,
    pass_times,
)
from recipes.planning.tensor_parallel import check_tensor_parallel, held, messages, sent_bytes, sized_plan
from recipes.planning.trace import BYTES, Traces

# Of a device's memory: the rest is taken by CUDA, by workspaces of kernels and by fragments. Not measured here.
USABLE = 0.9
WORKSPACE = 32 << 20  # that PyTorch gives cuBLAS on an H100; on older GPUs it is smaller
# PyTorch's allocator gives a tensor of more than 1 MB a block that is up to 1 MB larger. In all that benchmarks/host.py
# has measured, that adds less than this share.
BLOCKS = 0.01


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, by part.

    Attributes:
        state: weights, gradients and the optimizer's state.
        working: 16-bit weights in the backward pass, gathered ones under FSDP.
        buckets: in which DDP averages gradients.
        algorithms: of the recipe, such as an average.
        activations: the most that the tensors of a microbatch's pass take at once beside the working weights, less
            the gradients that are not there yet.
        others: data, cuBLAS's workspace, and the part of the allocator's blocks that no tensor fills.
    """

    state: float
    working: float
    buckets: float
    algorithms: float
    activations: float
    others: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))

    def fits(self, device: Device) -> bool:
        """Whether it fits into the memory of a device."""
        return self.total <= USABLE * device.memory


@dataclass(frozen=True)
class Setting:
    """One way to train, with what it takes.

    Attributes:
        division: DDP, or a strategy of FSDP with its replicas.
        tensor: devices that divide the matrices of each layer, `training.tensor_parallel`.
        microbatch: samples per pass.
        recompute: whether activations are recomputed.
        memory: on each device.
        time: of a step.
    """

    division: str
    tensor: int
    microbatch: int
    recompute: bool
    memory: Memory
    time: StepTime

    @property
    def way(self) -> str:
        """The division by which settings are grouped for comparison."""
        return self.division if self.tensor == 1 else f"tensor_parallel {self.tensor}"

    def __str__(self) -> str:
        division = self.division if self.tensor == 1 else f"tensor_parallel {self.tensor}, {self.division}"
        return f"{division}, microbatch {self.microbatch}{', recomputing' if self.recompute else ''}"


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

    def check_links(self) -> None:
        """Raises ValueError where the rate of links that are used is not known."""
        if self.device.within is None and min(self.world, self.machine) > 1:
            raise ValueError(
                "--gpu: links within a machine were not measured; calibrate again with torchrun --nproc_per_node N"
            )
        if self.device.between is None and self.world > self.machine:
            raise ValueError("--gpu: links between machines were not measured; give --between, in GB/s")


DIVISIONS: dict[str, FSDP | None] = {
    "DDP": None,
    "SHARD_GRAD_OP": FSDP(strategy="SHARD_GRAD_OP", sync="batch"),
    "FULL_SHARD": FSDP(strategy="FULL_SHARD"),
    "FULL_SHARD within machines": FSDP(strategy="FULL_SHARD", replicas="machines"),
}


def settings_of(runs: Iterable[Run]) -> Iterator[Setting]:
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
    place: Place,
) -> Iterator[Run]:
    """All ways to divide a recipe over devices. Those that its algorithms refuse are left out.

    Args:
        recipe: checked.
        task: on the meta device.
        traces: gives those of the task, with its matrices divided over a number of devices.
        passes: gives their memory, likewise.
        samples: a batch of any size.
        place: where.

    Raises:
        ValueError: the batch does not divide over the devices, or the rate of their links is not known.
    """
    machine = min(place.machine, place.world)
    place.check_links()
    tensors = [n for n in range(1, machine + 1) if machine % n == 0] if task.tensor_plan() else [1]
    ways = 0
    for tensor in tensors:
        for name, fsdp in DIVISIONS.items():
            training = dataclasses.replace(recipe.training, fsdp=fsdp, tensor_parallel=tensor)
            whole = fsdp is None and tensor == 1
            algorithms = recipe.algorithms if whole else _for_parts(recipe.algorithms)
            divided = dataclasses.replace(recipe, training=training, algorithms=algorithms)
            try:
                batch = training.device_batch(place.world)
                devices = Devices.of(training, place.world, machine)
                check_tensor_parallel(divided, devices, task)
                check_sharding(divided, task)
                costs = costs_of(divided, plan_of(divided, task, devices))
                _check_one_graph(divided, task, costs)
                _check_averages(divided, devices)
            except ValueError:
                continue
            # What FSDP would not divide is DDP, and what it divides within one machine only is FULL_SHARD.
            if fsdp is not None and (devices.shards == 1 or (fsdp.replicas == "machines" and devices.replicas == 1)):
                continue
            ways += 1
            label = "no FSDP" if fsdp is None and tensor == place.world > 1 else name
            if share_of_launches(algorithms) > share_of_launches(recipe.algorithms):
                label += ", without CUDA graphs"
            yield Run(label, divided, task, traces(tensor), passes(tensor), costs, devices, place, samples, batch)
    if not ways:
        _raise_indivisible(recipe, place)


def captured(algorithms: Mapping[str, Component]) -> bool:
    """Whether `cuda_graphs` launches the blocks."""
    return any(lever.name == "cuda_graphs" for lever in algorithms.values())


def share_of_launches(algorithms: Mapping[str, Component]) -> float:
    """Share of the host's time for launches that CUDA graphs leave."""
    compiled = any(lever.name == "compile" and lever.args.get("mode") in GRAPH_MODES for lever in algorithms.values())
    return CAPTURED if captured(algorithms) else COMPILED if compiled else 1


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


def _check_averages(recipe: Recipe, devices: Devices) -> None:
    """Raises ValueError where nothing would average the gradients of graphs; see `CudaGraphs.check_levers`."""
    averaged = any(lever.name == "block_all_reduce" for lever in recipe.algorithms.values())
    if captured(recipe.algorithms) and devices.replicas > 1 and not averaged:
        raise ValueError("cuda_graphs: without block_all_reduce")


def _raise_indivisible(recipe: Recipe, place: Place) -> None:
    """For a batch that no number of groups divides: say which numbers of devices do."""
    batch = recipe.training.global_batch
    near = [n for n in range(1, 2 * place.world + 1) if batch % n == 0]
    fits = {max(n for n in near if n <= place.world), *[n for n in near if n > place.world][:1]}
    instead = " or ".join(str(n) for n in sorted(fits))
    raise ValueError(
        f"training.global_batch: {batch} does not divide over {place.world} devices; the nearest numbers of devices "
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


@dataclass(frozen=True)
class Run:
    """A recipe on devices that are divided in one way.

    Attributes:
        division: see `Setting`.
        recipe: with the keys of this way.
        task: on the meta device.
        traces: of one of the devices that divide its matrices.
        passes: their memory.
        costs: of its components.
        devices: how they are divided.
        place: where they are.
        samples: a batch of any size.
        batch: samples per step on each device, which those that divide matrices share.
    """

    division: str
    recipe: Recipe
    task: Task
    traces: Traces
    passes: Passes
    costs: Costs
    devices: Devices
    place: Place
    samples: dict[str, Tensor]
    batch: int

    @cached_property
    def held(self) -> int:
        """Values that a device has if FSDP does not divide them."""
        return held(self.task, self.task, self.devices)

    @cached_property
    def gathered(self) -> list[int]:
        """Bytes of the units that FSDP gathers."""
        return gathered_sizes(self.recipe, self.task, self.costs, self.devices)

    def setting(self, microbatch: int, recompute: bool) -> Setting:
        """The memory and the time of the run with a microbatch."""
        memory, time = self.memory(microbatch, recompute), self.time(microbatch, recompute)
        return Setting(self.division, self.devices.tensor, microbatch, recompute, memory, time)

    def memory(self, microbatch: int, recompute: bool) -> Memory:
        """The memory of each device."""
        parameters, trained = parameter_counts(self.task)
        fsdp, devices, costs = self.recipe.training.fsdp, self.devices, self.costs
        halves = 2 * costs.stored_16_bit
        share = self.held / parameters
        state = state_bytes(parameters, trained, share / devices.shards, costs)
        passes = -(-self.batch // microbatch)
        # A single pass makes the gradients one by one, while activations are freed. They are there before it where
        # another pass came first, and in DDP's buckets; under FSDP they are counted as if they were.
        one_by_one = (FLOAT - halves / trained) * (passes == 1 and fsdp is None and devices.replicas == 1)
        followed = self.passes.recomputed if recompute else self.passes.kept
        if fsdp is None:
            forward, working = self.copies(recompute)
            buckets = FLOAT * trained * share * (devices.replicas > 1 and passes > 1 and costs.buckets)
        else:
            # One unit computes while the next one is gathered.
            forward = working = sum(self.gathered) if fsdp.strategy == "SHARD_GRAD_OP" else 2 * max(self.gathered)
            buckets = FLOAT * self.held * (fsdp.sync == "batch" and passes > 1)
        peak = followed.peak(microbatch, one_by_one, (forward, working))
        activations = peak - working - one_by_one * followed.gradients
        algorithms = sum(cost.device_bytes for cost in costs.algorithms.values())
        memory = Memory(state, working, buckets, algorithms, activations, 0.0)
        others = WORKSPACE + batch_bytes(self.samples, self.batch, microbatch)
        return dataclasses.replace(memory, others=others + BLOCKS * (memory.total + others))

    def copies(self, recompute: bool) -> tuple[float, float]:
        """Bytes of the 16-bit weights that a device has in the forward and in the backward pass without FSDP.

        Autocast keeps them for the length of a forward pass, autograd or `working_weights` for that of the backward
        pass. Those of blocks that are computed again are made again, for one block at a time. Compiled blocks make
        theirs whenever they run.
        """
        parameters, _ = parameter_counts(self.task)
        every = BYTES * (parameters - self.costs.stored_16_bit) * self.held / parameters
        levers = {lever.name for lever in self.recipe.algorithms.values()}
        inside = [held(block, self.task, self.devices) for block in self.task.recomputed_blocks()]
        if not recompute or "working_weights" in levers or not inside:
            return every, every
        single = min(every, BYTES * (self.held - sum(inside) + max(inside)))
        return (single if "compile" in levers else every), single

    def time(self, microbatch: int, recompute: bool) -> StepTime:
        """The time of a step."""
        passes = self.batch / microbatch
        place, devices, trace = self.place, self.devices, self.traces.at(microbatch)
        compute, traffic, gaps = pass_times(trace, place.device, place.peak, place.shares, recompute)
        parameters, trained = parameter_counts(self.task)
        update = UPDATE_BYTES * self.held * (trained / parameters) / devices.shards
        update /= place.shares.memory * place.device.bandwidth
        within, between = self.sent(math.ceil(passes))
        messages = message_seconds(within, between, devices, place.machine, place.device, place.shares)
        operations = passes * sum(1 for _ in trace.executed(recompute))
        host = LAUNCH * operations * share_of_launches(self.recipe.algorithms) + self.averaging()
        parts = passes * compute, passes * traffic, update, passes * gaps, messages, host
        return StepTime(*parts, exposed=self.exposed(passes, recompute))

    def averaging(self) -> float:
        """Seconds of the host for the averaging of gradients over whole copies of the model."""
        if self.recipe.training.fsdp is not None or self.devices.replicas == 1:
            return 0.0
        by_block = any(lever.name == "block_all_reduce" for lever in self.recipe.algorithms.values())
        return (BY_BLOCK if by_block else BY_DDP) * sum(p.requires_grad for p in self.task.parameters())

    def exposed(self, passes: float, recompute: bool) -> float:
        """Seconds of the messages for which the devices that divide matrices wait."""
        if self.devices.tensor == 1:
            return 0.0
        plan, shares = sized_plan(self.recipe, self.task), self.place.shares
        devices, sequence = self.devices.tensor, self.recipe.training.sequence_parallel
        again = {module for block in self.task.recomputed_blocks() for module in block.modules()} if recompute else ()
        sent = sent_bytes(
            plan,
            self.batch,
            devices,
            value=BYTES,
            loss_value=BYTES,
            sequence=sequence,
            again=again,
            passes=math.ceil(passes),
        )
        count = sum(message.count for message in messages(plan, self.batch, devices, sequence, again))
        return sent / (shares.links * self.place.device.within) + shares.gap * count * passes

    def sent(self, passes: int) -> tuple[float, float]:
        """Bytes that each device sends per step to other shards, and to other replicas."""
        fsdp, devices = self.recipe.training.fsdp, self.devices
        within = between = 0.0
        if fsdp is not None and devices.shards > 1:
            within = sum(shard_traffic(fsdp, devices, self.gathered, self.held, passes))
        if devices.replicas > 1:
            between = replica_traffic(self.task, self.costs, devices).sent_bytes
        return within, between
