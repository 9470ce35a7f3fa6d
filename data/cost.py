"""What a component of a recipe costs, as the component itself reports it to the dry run.

A component class defines a class method `cost(args, plan) -> Cost`; a builder function is decorated with
`@with_cost(function)`. The dry run (`recipes.planning`) adds up the costs of all components, without knowing any of
them by name. A component that defines neither costs nothing.

Example::

    class Averager:
        @classmethod
        def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
            return Cost(device_bytes=4 * plan.trained * plan.share, note="for the average")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from data.encoded.manifest import Manifest

FLOAT = 4  # bytes of a 32-bit number, the format of weights, gradients and most optimizers' state

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True)
class Plan:
    """The run for which a component reports its cost.

    Attributes:
        task: the model, on the meta device: its parameters have shapes and no memory.
        parameters: number of the model's parameters.
        trained: number of those that are trained.
        replicas: groups of devices that each hold the whole model.
        shards: devices of a replica, over which the model is divided; 1 without.
        output: folder of the run.
        averaged: whether the run has averaged weights beside the trained ones. Correct only for
            callbacks, whose costs are computed last.
        build: builds a component that is an argument of this one, such as the streams of a data component.
        tensor: devices of those `shards` that divide the matrices of each layer.
        matrices: share of the parameters that these divide; they all have the others.
        training: whether a data component is for training, and not a validation set.
        manifest: of the training data, if it is on this machine. Set only for callbacks.
    """

    task: Any
    parameters: int
    trained: int
    replicas: int
    shards: int
    output: str
    averaged: bool
    build: Callable[[Any], Any]
    tensor: int = 1
    matrices: float = 1.0
    training: bool = True
    manifest: Manifest | None = None

    @property
    def share(self) -> float:
        """Share of the model's parameters that each device holds."""
        return (self.matrices + (1 - self.matrices) * self.tensor) / self.shards


@dataclass(frozen=True)
class Epoch:
    """The size of an epoch of a data component.

    Attributes:
        samples: over all devices; None where that is not known on this machine.
        incomplete_batch: whether an incomplete last batch is trained on.
        endless: whether the data is a stream without end, which has no epochs.
    """

    samples: int | None
    incomplete_batch: bool = False
    endless: bool = False


@dataclass(frozen=True)
class Files:
    """Files that a component writes during a run.

    Attributes:
        every: interval; None: once, at the end of the run.
        what: what is written each time, such as "a grid of 8 images".
        folder: where.
        held: bytes that they take at the same time, for files that the disk must have room for.
    """

    every: str | None
    what: str
    folder: str
    held: int = 0


@dataclass(frozen=True)
class Cost:
    """What one component adds to a run. Memory is given per device, what is stored for the whole model.

    Attributes:
        device_bytes: memory on each device.
        host_bytes: host memory for each device.
        note: what the memory is for, such as "for the average, from 0.5dur on".
        checkpoint_bytes: size of the component's state in a checkpoint.
        averaged_bytes: size of averaged weights, which checkpoints have once the average has begun; None: the component
            averages nothing.
        sent_bytes: bytes that each device sends to other replicas per step, for a component that takes the place of
            the usual average of gradients; None: it does not.
        sent_note: how `sent_bytes` come about.
        buckets: whether whole copies of the model average gradients in 32-bit buckets, which lie beside the sums of the
            gradients of several microbatches.
        stored_16_bit: number of trained values that are stored in 16 bits instead of 32, with their gradients.
        update_flops: floating-point operations of each device per step in the update of the weights, for an optimizer
            that computes products of matrices.
        update_bytes: bytes that each device sends per step in this update, which waits for them.
        gathered: number format in which blocks are gathered under FSDP, for a component that sets it: "fp16".
        epoch: size of an epoch, for data.
        files: files that are written, for callbacks.
        lines: further lines of text.
    """

    device_bytes: float = 0
    host_bytes: float = 0
    note: str = ""
    checkpoint_bytes: int = 0
    averaged_bytes: int | None = None
    sent_bytes: float | None = None
    sent_note: str = ""
    buckets: bool = True
    stored_16_bit: int = 0
    update_flops: float = 0
    update_bytes: float = 0
    gathered: str | None = None
    epoch: Epoch | None = None
    files: Files | None = None
    lines: tuple[str, ...] = ()


def with_cost(cost: Callable[[dict[str, Any], Plan], Cost]) -> Callable[[Builder], Builder]:
    """Decorator for a builder function: `cost` returns what the component costs.

    Args:
        cost: takes the component's arguments, defaults included, and the plan.
    """

    def attach(builder: Builder) -> Builder:
        builder.cost = cost
        return builder

    return attach


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def size_text(size: float) -> str:
    """A number of bytes as MB or GB: "3.5 GB"."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def count_text(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun: "1 step", "2,000 steps"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
