"""Work on each block's gradients beside the backward pass of the blocks before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


class Overlap(Generic[Result]):
    """Starts work on a block as soon as the last microbatch has finished its gradients.

    Blocks are worked on one at a time, in the order in which their gradients are finished: the reverse of the model's,
    and the same on every rank, so that the work may communicate. On a GPU its kernels run on a stream of their own, and
    the program does not wait; on a CPU a thread does the work.

    For gradients that FSDP2 divides: it assigns them, and calls a parameter's hooks, when they are averaged over the
    shards. DistributedDataParallel writes gradients once more at the end of the backward pass, over what is done here.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Parameter]],
        work: Callable[[int], Result],
        before: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            blocks: all trained parameters of each block.
            work: what is done to a block, by its number.
            before: what is done at once, in the backward pass itself, so that all that follows the pass finds it done;
                not for blocks whose work starts in `finish`.
        """
        self.blocks = blocks
        self.work = work
        self.before = before
        self.missing: list[int] | None = None  # gradients to come for each block; None outside of batches
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
            passes: backward passes of the batch, the last of which finishes the gradients.
        """
        self.missing = [passes * len(parameters) for parameters in self.blocks]
        self.results = [None] * len(self.blocks)

    def finish(self) -> list[Result]:
        """Results of all blocks, once the backward passes are done; work that never started is done now."""
        self.missing = None
        for number in reversed(range(len(self.blocks))):  # a parameter that the batch did not use has no hook called
            if self.results[number] is None:
                self._start(number)
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return [r.result() if isinstance(r, Future) else r for r in self.results]

    def _arrived(self, number: int, _: nn.Parameter) -> None:
        if self.missing is None:  # a backward pass that trains nothing
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
        # The hook is called where the gradients are averaged: behind that stream's work they are there. Their memory is
        # that stream's too, and is not given back before `finish` made all others wait.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            self.results[number] = self.work(number)
