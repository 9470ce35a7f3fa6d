"""Work on the gradients of each block, overlapped with the backward pass of the blocks before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


class Overlap(Generic[Result]):
    """Starts work on a block as soon as its gradients are complete, in the last backward pass of a batch.

    Blocks are processed one at a time, in the order in which their gradients are completed. This is the reverse of the
    order in the model, and the same on every rank, so that the work may communicate. On a GPU, its kernels run on a
    separate stream and the host does not wait; on a CPU, a thread does the work.

    It is for gradients that FSDP2 shards, which assigns them and calls the hooks of a parameter once they are averaged
    over the shards. DistributedDataParallel writes gradients again at the end of the backward pass, which would
    overwrite the result of the work.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Parameter]],
        work: Callable[[int], Result],
        before: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            blocks: the parameters of each block for whose gradients its work waits.
            work: called with the number of a block.
            before: called with the number of a block before its work starts, synchronously in the backward pass, so
                that it is done when the pass ends. Not called for blocks whose work starts in `finish`.
        """
        self.blocks = blocks
        self.work = work
        self.before = before
        self.missing: list[int] | None = None  # number of missing gradients per block; None outside of batches
        self.results: list[Result | Future[Result] | None] = [None] * len(blocks)
        device = blocks[0][0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="overlap") if self.stream is None else None
        for number, parameters in enumerate(blocks):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def begin(self, passes: int) -> None:
        """A batch begins.

        Args:
            passes: number of backward passes that call the hooks of a parameter; the last completes the gradients.
        """
        self.missing = [passes * len(parameters) for parameters in self.blocks]
        self.results = [None] * len(self.blocks)

    def finish(self) -> list[Result]:
        """The results of all blocks, after the backward passes. Work that has not started is done now."""
        self.missing = None
        # Hooks of parameters that the batch did not use are not called.
        for number in reversed(range(len(self.blocks))):
            if self.results[number] is None:
                self._start(number)
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return [r.result() if isinstance(r, Future) else r for r in self.results]

    def _arrived(self, number: int, _: nn.Parameter) -> None:
        if self.missing is None:  # a backward pass outside of training
            return
        self.missing[number] -= 1
        if self.missing[number] == 0:
            if self.before is not None:
                self.before(number)
            self._start(number)
        assert self.missing[number] >= 0, "more backward passes than were announced"

    def _start(self, number: int) -> None:
        if self.stream is None:
            self.results[number] = self.worker.submit(self.work, number)
            return
        # The hook is called on the stream that averages the gradients: they are complete once its work is done. Their
        # memory belongs to that stream, too, and is not reused before `finish` has made other streams wait.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            self.results[number] = self.work(number)
