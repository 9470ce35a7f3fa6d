"""The time of a step by a roofline: each operation takes as long as its arithmetic or its memory traffic, whichever is
longer, and a step as long as the GPU's work, its messages or the host's launches, whichever is longest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.algorithms.modules.compile import GRAPH_MODES
from recipes.config.values import Component
from recipes.planning.devices import Devices
from recipes.planning.hardware.gpus import Device, Shares
from recipes.planning.tracing.trace import Trace

# Seconds of the host per operation of a trace, which are 1.6 to 1.8 launches each: autocast casts, and levers replace
# operations. Between the rows of benchmarks/host.py, on one core: those of the transformer take less.
LAUNCH = 33e-6
# Shares of these seconds that CUDA graphs of `compile` and of `cuda_graphs` leave there.
COMPILED, CAPTURED = 0.27, 0.12
# Seconds of the host per parameter whose gradient is averaged over whole copies of the model: what rows under Lightning
# of `benchmarks/host.py --averaging` take longer than those without averaging. Under DDP 10 without CUDA graphs, and 6
# with those of torch.compile.
BY_DDP, BY_BLOCK = 10e-6, 1e-6
# Seconds of the host per unit of FSDP and microbatch, for its hooks and collectives: what the rows with FSDP of
# `benchmarks/host.py` take longer than those without.
BY_UNIT = {"SHARD_GRAD_OP": 1.5e-3, "FULL_SHARD": 2.0e-3}
# Bytes per trained value that an update moves: weight, gradient and two moments are read, and all but the gradient
# written.
UPDATE_BYTES = 28


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on each device, by part.

    Attributes:
        compute: operations that arithmetic bounds.
        traffic: operations that memory traffic bounds.
        update: of the weights.
        messages: sent within and between machines, if nothing else went on.
        exposed: messages of tensor parallelism and of the optimizer, for which the GPU waits.
        gaps: between operations.
        host: launches.
    """

    compute: float
    traffic: float
    update: float
    gaps: float
    messages: float
    host: float
    exposed: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of the GPU's own work."""
        return self.compute + self.traffic + self.update + self.gaps

    @property
    def total(self) -> float:
        """Seconds of the step, in which other messages than the exposed ones, and launches, overlap with the work."""
        return max(self.device + self.exposed, self.messages + self.exposed, self.host)

    @property
    def bound(self) -> str:
        """What limits the speed of the step."""
        if self.host == self.total > self.device + self.exposed:
            return "the host's launches"
        if self.messages > self.device:
            return "messages"
        parts = {
            "arithmetic": self.compute, "memory traffic": self.traffic, "update": self.update, "gaps": self.gaps,
            "exposed messages": self.exposed,
        }  # fmt: skip
        return max(parts, key=parts.__getitem__)


def captured(algorithms: Mapping[str, Component]) -> bool:
    """Whether `cuda_graphs` launches the blocks."""
    return any(lever.name == "cuda_graphs" for lever in algorithms.values())


def share_of_launches(algorithms: Mapping[str, Component]) -> float:
    """Share of the host's time for launches that CUDA graphs leave."""
    compiled = any(lever.name == "compile" and lever.args.get("mode") in GRAPH_MODES for lever in algorithms.values())
    return CAPTURED if captured(algorithms) else COMPILED if compiled else 1


def pass_times(
    trace: Trace, device: Device, peak: float, shares: Shares, recompute: bool
) -> tuple[float, float, float]:
    """Seconds of a forward and backward pass: operations that arithmetic bounds, those that memory bounds, and gaps.

    Args:
        trace: of a microbatch.
        device: that runs it.
        peak: FLOP/s of the device by its data sheet.
        shares: reached.
        recompute: the forward passes of blocks run twice.
    """
    compute = traffic = gaps = 0.0
    for operation in trace.executed(recompute):
        arithmetic = operation.flops / (shares.compute * peak)
        memory = operation.bytes / (shares.memory * device.bandwidth)
        if arithmetic > memory:
            compute += arithmetic
        else:
            traffic += memory
        gaps += shares.gap
    return compute, traffic, gaps


def message_seconds(
    within: float, between: float, devices: Devices, machine: int, device: Device, shares: Shares
) -> float:
    """Seconds of a step's messages, those of tensor parallelism excluded.

    A ring over several machines passes each adapter once, so that a machine sends what one device does; rings between
    devices of the same number in each machine share the adapters. The devices that divide matrices follow each other,
    then shards, then replicas.

    Args:
        within: bytes that each device sends to the other shards of its replica.
        between: bytes that each device sends to other replicas.
        devices: of the run.
        machine: devices of a machine.
        device: with its links, of which those that are used are known.
        shares: reached.
    """
    if not within and not between:
        return 0.0
    inside, outside = shares.links * device.within, shares.links * (device.between or math.inf)
    replica = devices.shards * devices.tensor
    rate = inside if replica <= machine else min(inside, outside / devices.tensor)
    # Replicas of one device each make one ring over all devices; otherwise one ring per shard, several per machine.
    beyond = devices.world > machine
    rings = min(replica, machine)
    return within / rate + between / (min(inside, outside / rings) if beyond else inside)
