"""The operations of a model's forward and backward pass, read off on the meta device.

Weights and inputs are counted in bf16, results in the formats that autocast gives them: products in bf16, the sums of
a residual stream that is float32 in float32. Attention is counted as a fused kernel, and every other operation as
PyTorch runs it, one by one; levers that fuse operations make a run faster than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from recipes.models.task import Task
from recipes.planning.tracing.autocast import MetaAutocast
from recipes.planning.tracing.gpu_kernels import GpuKernels

Kind = Literal["convolution", "product", "attention", "other"]
BYTES = 2  # of a bf16 number
# Operations that describe memory, besides views.
NO_KERNEL = {
    "alias", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "lift_fresh", "arange",
}  # fmt: skip
PASSES = ("operations", "backward")  # of a trace
NUMBERS = (2, 3)  # of samples, from which any other number follows: work and traffic are linear in it


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        kind: what sort of work it is.
        flops: of it; a multiply-add counts as 2. 0 for `other`.
        bytes: that it reads and writes.
        recomputed: whether it is in a block that recomputation covers.
    """

    kind: Kind
    flops: float
    bytes: float
    recomputed: bool = False


@dataclass(frozen=True)
class Trace:
    """A forward and backward pass.

    Attributes:
        operations: of the forward pass, in their order.
        backward: those of the backward pass.
        visible: share of attention's pairs of positions that the model's masks show; only those are counted.
    """

    operations: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    visible: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return sum(operation.flops for operation in self.operations)

    def executed(self, recompute: bool) -> Iterator[Operation]:
        """The operations of both passes, those twice that are recomputed."""
        yield from self.operations
        if recompute:
            yield from (operation for operation in self.operations if operation.recomputed)
        yield from self.backward


class Traces:
    """The trace of a model for any number of samples, from those of two numbers."""

    def __init__(self, low: Trace, high: Trace) -> None:
        """
        Args:
            low: with `NUMBERS[0]` samples; high: with `NUMBERS[1]`.
        """
        if any([o.kind for o in getattr(low, way)] != [o.kind for o in getattr(high, way)] for way in PASSES):
            raise ValueError("the model's operations depend on the number of samples: its time cannot be planned")
        self.low, self.high = low, high
        self._known: dict[int, Trace] = {}

    def at(self, samples: int) -> Trace:
        """The trace with a number of samples."""
        if samples not in self._known:
            self._known[samples] = self._at(samples)
        return self._known[samples]

    def _at(self, samples: int) -> Trace:
        def line(low: float, high: float) -> float:
            slope = (high - low) / (NUMBERS[1] - NUMBERS[0])
            return low + slope * (samples - NUMBERS[0])

        passes = (
            tuple(
                dataclasses.replace(low, flops=line(low.flops, high.flops), bytes=line(low.bytes, high.bytes))
                for low, high in zip(getattr(self.low, way), getattr(self.high, way), strict=True)
            )
            for way in PASSES
        )
        return Trace(*passes, visible=self.low.visible)


def traces_of(task: Task, batches: tuple[dict[str, Tensor], dict[str, Tensor]], visible: float | None = None) -> Traces:
    """The traces of a task on the meta device.

    Args:
        task: built on the meta device; its weights become bf16.
        batches: of `NUMBERS` samples, on the meta device.
        visible: see `trace`.
    """
    task.to(torch.bfloat16)
    low, high = (trace(task, batch, visible) for batch in batches)
    if len(low.operations) != len(high.operations):
        low = trace(task, batches[0], visible)  # the first call has made masks, which later ones have
    return Traces(low, high)


def trace(task: Task, batch: dict[str, Tensor], visible: float | None = None) -> Trace:
    """The forward and backward pass of a batch.

    Args:
        task: on the meta device.
        batch: on the meta device.
        visible: share of attention's pairs that are counted; None: as many as the model itself counts. The part of a
            divided model does not count itself, so it is given the whole model's share.
    """
    batch = {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch.items()}
    recorder = _Recorder()
    with torch.random.fork_rng(devices=[]), recorder.watch(task):  # noqa: SIM117 - modes come last
        with recorder, GpuKernels(recorder.attention), MetaAutocast():
            loss = task(batch)["total"]
            forward = recorder.taken()
            trained = [p for p in task.parameters() if p.requires_grad]
            if trained:
                torch.autograd.grad(loss, trained, allow_unused=True)
    visible = _visible(forward, task, batch) if visible is None else visible
    return Trace(_shown(forward, visible), _shown(recorder.taken(), visible), visible)


def _visible(operations: list[Operation], task: Task, batch: dict[str, Tensor]) -> float:
    """The share of attention's work that the model counts: it leaves out masked pairs, as kernels do."""
    counted = task.forward_flops()
    attention = sum(o.flops for o in operations if o.kind == "attention")
    if counted is None or not attention:
        return 1.0
    samples = len(next(iter(batch.values())))
    return (counted * samples - sum(o.flops for o in operations if o.kind != "attention")) / attention


def _shown(operations: list[Operation], visible: float) -> tuple[Operation, ...]:
    """Operations, with a share of attention's work."""
    return tuple(dataclasses.replace(o, flops=visible * o.flops) if o.kind == "attention" else o for o in operations)


class _Recorder(TorchDispatchMode):
    """Lists operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.recomputed = False

    @contextmanager
    def watch(self, task: Task) -> Iterator[None]:
        """A context in which the operations of blocks that recomputation covers are marked."""
        handles = []
        for block in task.recomputed_blocks():
            handles.append(block.register_forward_pre_hook(lambda *_: self._mark(True)))
            handles.append(block.register_forward_hook(lambda *_: self._mark(False)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, recomputed: bool) -> None:
        self.recomputed = recomputed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.is_view or packet.__name__ in NO_KERNEL:
            return result
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0.0
        kind: Kind = "other" if not flops else "convolution" if "convolution" in packet.__name__ else "product"
        self.operations.append(Operation(kind, float(flops), _bytes((args, kwargs, result)), self.recomputed))
        return result

    def attention(self, flops: float, tensors: Iterable[Tensor]) -> None:
        """Add a fused attention."""
        self.operations.append(Operation("attention", flops, _bytes(tensors), self.recomputed))

    def taken(self) -> list[Operation]:
        """The operations since the last call."""
        found, self.operations = self.operations, []
        return found


def _bytes(values: Any) -> float:
    """Bytes of the tensors among some values, which may be nested."""
    return float(sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor)))
