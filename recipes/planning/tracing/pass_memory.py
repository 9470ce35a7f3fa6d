"""The memory of a forward and backward pass: each tensor is followed from its first to its last use on the meta device.

At the peak there is more than what autograd keeps: the gradient that enters a layer and the one that leaves it, and
what an operation makes for itself, such as the logits of some rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.cost import FLOAT
from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.models.autoregressive.loss import CHUNK
from recipes.models.task import Task
from recipes.planning.tracing.autocast import MetaAutocast
from recipes.planning.tracing.gpu_kernels import GpuKernels

FEWEST = 4  # samples that are followed, besides FACTOR times as many: any other number follows from these two
FACTOR = 32


@dataclass(frozen=True)
class Interval:
    """The forward pass, or a part of the backward pass that ends with the gradient of a parameter, or with the pass.

    Attributes:
        highest: bytes that tensors take at once, without weights and without gradients that are complete.
        complete: values of the gradients that are complete when it begins.
    """

    highest: float
    complete: int


class PassMemory:
    """The peak of a pass for any number of samples. In each interval it is on the line through those of two numbers."""

    def __init__(self, few: int, low: list[Interval], high: list[Interval]) -> None:
        """
        Args:
            few: samples.
            low: with `few` samples.
            high: with `FACTOR` times as many.

        Raises:
            ValueError: the intervals of the two differ.
        """
        if [interval.complete for interval in low] != [interval.complete for interval in high]:
            raise ValueError("the order of gradients depends on the number of samples: its memory cannot be planned")
        self.few, self.low, self.high = few, low, high

    @property
    def gradients(self) -> int:
        """Values of all gradients."""
        return self.low[-1].complete

    def peak(self, samples: int, per_gradient: float = 0.0, copies: tuple[float, float] = (0.0, 0.0)) -> float:
        """Bytes.

        Args:
            samples: of the pass.
            per_gradient: bytes for each value of the gradients that are complete. 0 where memory for all of them is
                there before the pass begins.
            copies: bytes of the weights' 16-bit copies in the forward and in the backward pass.
        """
        share = (samples - self.few) / (FACTOR * self.few - self.few)
        forward, *backward = (
            low.highest + share * (high.highest - low.highest) + per_gradient * low.complete
            for low, high in zip(self.low, self.high, strict=True)
        )
        return max(copies[0] + forward, copies[1] + max(backward))


@dataclass(frozen=True)
class Passes:
    """Both kinds of pass.

    Attributes:
        kept: activations are kept.
        recomputed: those inside of blocks are computed again.
    """

    kept: PassMemory
    recomputed: PassMemory


def passes_of(task: Task, batch_of: Callable[[int], dict[str, Tensor]]) -> Passes:
    """The memory of a task's passes.

    Args:
        task: on the meta device, with its levers; its weights become bf16.
        batch_of: gives a batch of so many samples, on the meta device.
    """
    task.to(torch.bfloat16)
    # A loss over a vocabulary takes CHUNK tokens at a time. From the second chunk on, when a result of the first one is
    # still there, its memory does not depend on the number of samples.
    tokens = sum(x.numel() for x in batch_of(1).values() if x.dtype == torch.long)
    few = max(FEWEST, 2 * CHUNK // tokens + 1 if tokens else 0)
    batches = batch_of(few), batch_of(FACTOR * few)
    with torch.no_grad(), _as_on_a_gpu():
        task(_in_16_bits(batches[0]))  # a first call may make masks, which later ones have
    kept, recomputed = ([follow(task, batch, again) for batch in batches] for again in (False, True))
    return Passes(PassMemory(few, *kept), PassMemory(few, *recomputed))


def follow(task: Task, batch: dict[str, Tensor], recomputed: bool = False) -> list[Interval]:
    """A forward and backward pass of a batch.

    Args:
        task: on the meta device, with bf16 weights.
        batch: on the meta device.
        recomputed: whether blocks are computed again in the backward pass.
    """
    batch = _in_16_bits(batch)
    recorder = _Recorder([*task.parameters(), *task.buffers()])
    trained = [p for p in task.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(recorder.complete) for p in trained]
    recorder.note(batch)  # layers that multiply it keep it
    try:
        with _recomputing(task, recomputed), recorder, _as_on_a_gpu():
            loss = task(batch)["total"]
            del batch
            recorder.end_interval()
            if trained:
                # `loss.backward()` would turn the modes off for what is recomputed.
                ones = torch.ones_like(loss)
                torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
    finally:
        for handle in handles:
            handle.remove()
    return recorder.found()


def _in_16_bits(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch.items()}


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    with GpuKernels(lambda *_: None), MetaAutocast(wide_norms=True):
        yield


@contextmanager
def _recomputing(task: Task, recomputed: bool) -> Iterator[None]:
    """A context in which blocks are computed again in the backward pass."""
    blocks = list(dict.fromkeys(task.recomputed_blocks())) if recomputed else []
    before = [vars(block).get("forward") for block in blocks]
    recompute(blocks)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


class _Recorder(TorchDispatchMode):
    """Adds up the memory of the tensors that are alive."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in weights}
        self.bytes = self.highest = 0
        self.values = 0
        self.intervals: list[Interval] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, made: Any) -> None:
        """Count the memory of new tensors."""
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.highest = max(self.highest, self.bytes)

    def _freed(self, key: int) -> None:
        self.bytes -= self.alive.pop(key)

    def complete(self, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is complete. Autocast gives it in 16 bits, of which a 32-bit one is made."""
        self.highest = max(self.highest, self.bytes + FLOAT * parameter.numel())
        self.end_interval()
        self.values += parameter.numel()
        parameter.grad = None
        self.highest = self.bytes

    def end_interval(self) -> None:
        """Must be called when the backward pass begins, and when a gradient is complete."""
        self.intervals.append(Interval(self.highest, self.values))
        self.highest = self.bytes

    def found(self) -> list[Interval]:
        """The intervals of the whole pass."""
        return [*self.intervals, Interval(self.highest, self.values)]
