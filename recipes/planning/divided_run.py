"""A recipe on devices that are divided in one way: what it takes of each device's memory, and the time of a step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from data.cost import FLOAT
from recipes.config.recipe import Recipe
from recipes.models.task import Task
from recipes.planning.batches import batch_bytes
from recipes.planning.costs import Costs, parameter_counts
from recipes.planning.devices import Devices
from recipes.planning.footprint import gathered_at_once, gathered_sizes, replica_traffic, shard_traffic, state_bytes
from recipes.planning.hardware.gpus import Device, Shares
from recipes.planning.step_time import (
    BY_BLOCK,
    BY_DDP,
    BY_UNIT,
    LAUNCH,
    UPDATE_BYTES,
    StepTime,
    message_seconds,
    pass_times,
    share_of_launches,
)
from recipes.planning.tensor_parallel import held, messages, sent_bytes, sized_plan
from recipes.planning.tracing.pass_memory import Passes
from recipes.planning.tracing.trace import BYTES, Traces

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
        buckets: in which DDP averages gradients, or whole gradients that FSDP reduces once per batch.
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
class Cluster:
    """Devices of one kind on which a recipe is to be trained.

    Attributes:
        device: their kind.
        peak: FLOP/s of each by the data sheet.
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


@dataclass(frozen=True)
class DividedRun:
    """A recipe on devices that are divided in one way.

    Attributes:
        division: see `Setting`.
        recipe: with the keys of this way.
        task: on the meta device.
        traces: of one of the devices that divide its matrices.
        passes: their memory.
        costs: of its components.
        devices: how they are divided.
        cluster: to which they belong.
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
    cluster: Cluster
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
            buckets = FLOAT * trained * (devices.replicas > 1 and passes > 1 and costs.buckets)
        else:
            forward = working = gathered_at_once(fsdp, self.gathered)
            # The reduced gradients of a unit, which `state` has, take the place of the whole ones.
            buckets = FLOAT * self.held * (1 - 1 / devices.shards) * (fsdp.sync == "batch" and passes > 1)
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
        cluster, devices, trace = self.cluster, self.devices, self.traces.at(microbatch)
        compute, traffic, gaps = pass_times(trace, cluster.device, cluster.peak, cluster.shares, recompute)
        parameters, trained = parameter_counts(self.task)
        update = UPDATE_BYTES * self.held * (trained / parameters) / devices.shards
        update /= cluster.shares.memory * cluster.device.bandwidth
        update += self.costs.optimizer.update_flops / (cluster.shares.compute * cluster.peak)
        within, between = self.sent(math.ceil(passes))
        messages = message_seconds(within, between, devices, cluster.machine, cluster.device, cluster.shares)
        operations = passes * sum(1 for _ in trace.executed(recompute))
        host = LAUNCH * operations * share_of_launches(self.recipe.algorithms) + self.averaging(passes)
        parts = passes * compute, passes * traffic, update, passes * gaps, messages, host
        return StepTime(*parts, exposed=self.exposed(passes, recompute) + self.exposed_in_update())

    def averaging(self, passes: float) -> float:
        """Seconds of the host for the averaging of gradients over whole copies of the model, or for FSDP's units."""
        fsdp = self.recipe.training.fsdp
        if fsdp is not None:
            return passes * len(self.gathered) * BY_UNIT[fsdp.strategy]
        if self.devices.replicas == 1:
            return 0.0
        by_block = any(lever.name == "block_all_reduce" for lever in self.recipe.algorithms.values())
        return (BY_BLOCK if by_block else BY_DDP) * sum(p.requires_grad for p in self.task.parameters())

    def exposed(self, passes: float, recompute: bool) -> float:
        """Seconds of the messages for which the devices that divide matrices wait."""
        if self.devices.tensor == 1:
            return 0.0
        plan, shares = sized_plan(self.recipe, self.task), self.cluster.shares
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
        return sent / (shares.links * self.cluster.device.within) + shares.gap * count * passes

    def exposed_in_update(self) -> float:
        """Seconds of the messages of the optimizer, for which all devices wait."""
        cluster, every = self.cluster, Devices(self.devices.world, replicas=self.devices.world)
        sent = self.costs.optimizer.update_bytes
        return message_seconds(0.0, sent, every, cluster.machine, cluster.device, cluster.shares)

    def sent(self, passes: int) -> tuple[float, float]:
        """Bytes that each device sends per step to other shards, and to other replicas."""
        fsdp, devices = self.recipe.training.fsdp, self.devices
        within = between = 0.0
        if fsdp is not None:
            within = sum(shard_traffic(fsdp, devices, self.gathered, self.held, passes))
        if devices.replicas > 1:
            between = replica_traffic(self.task, self.costs, devices).sent_bytes
        return within, between
