"""Averages gradients over ranks with one message per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.cost import Cost, Plan, all_reduce_bytes
from data.system.log import log
from recipes.training.lever import Lever
from recipes.training.ranks import world_size
from recipes.training.run import Run

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BlockAllReduce(Lever):
    """Replaces DistributedDataParallel: averages the gradients of each block of the model by one all-reduce.

    DistributedDataParallel copies gradients into its buckets one by one, with a kernel per parameter. That is a fifth
    of the kernels of a step of Stable Diffusion 2's U-Net, and with CUDA graphs most of them. Here all gradients of a
    block are copied by a few kernels once the last of them is complete, in the backward pass of the last microbatch,
    and sent while the backward pass of other blocks goes on. What is outside of the blocks is a block of its own.

    Gradients are those of DistributedDataParallel; with `wire: bf16` they are rounded to 8 bits before they are added.
    """

    averages = True

    def __init__(self, task: nn.Module, *, wire: Literal["fp32", "bf16"] = "fp32") -> None:
        """
        Args:
            task: the model; its `blocks()` are averaged one by one.
            wire: number format in which gradients are sent and added. bf16 halves the communication. Gradients that are
                not stored in 32 bits are sent as they are stored.

        Raises:
            ValueError: the model trains nothing.
        """
        if not groups_of(task):
            raise ValueError("block_all_reduce: the model trains no parameter; remove the lever")
        self.task = task
        self.wire = wire
        self.buckets: list[Bucket] = []
        self.unsent: list[Bucket] = []  # of the present batch

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """In 32 bits the same as DistributedDataParallel's, so that nothing is added; see `data.cost`."""
        if plan.replicas == 1:
            return Cost(lines=("not used with one process",))
        if args["wire"] == "fp32":
            return Cost()
        size = 2 * plan.trained
        return Cost(
            device_bytes=size,
            note="for the gradients that are sent",
            sent_bytes=all_reduce_bytes(size, plan.replicas),
            sent_note="all in bf16",
            buckets=False,
        )

    def check_divided(self) -> None:
        """Find what cannot work where another option averages gradients.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "block_all_reduce: it averages gradients of whole copies of the model; training.fsdp, "
            "training.tensor_parallel and powersgd average them in their own way; remove it"
        )

    def begin(self, run: Run) -> None:
        if self.buckets:  # the same trainer may fit a second time
            return
        if world_size() == 1:
            log.info("block_all_reduce: not used, there is one process")
            return
        self.buckets = [
            Bucket(parameters, FORMATS[self.wire], world_size(), self._send_complete)
            for parameters in groups_of(self.task)
        ]
        log.info(f"block_all_reduce: {len(self.buckets)} messages per batch, in {self.wire}")

    def before_backward(self, run: Run) -> None:
        if run.last_pass:
            self.unsent = list(self.buckets)
            for bucket in self.buckets:
                bucket.expect()

    def after_backward(self, run: Run) -> None:
        """Other levers may change gradients from here on, so that the averages must be there."""
        if run.last_pass:
            for bucket in self.buckets:
                bucket.fill()
            self._send_complete()
            for bucket in self.buckets:
                bucket.receive()

    def _send_complete(self) -> None:
        """Send what is complete, in the same order on every rank: one may leave out a parameter that others use."""
        while self.unsent and not self.unsent[0].missing:
            self.unsent.pop(0).send()


def groups_of(task: nn.Module) -> list[list[nn.Parameter]]:
    """Trained parameters of each block and of the rest of a task, those of different number formats apart.

    They are in the order in which backward passes mostly complete them: the last block comes first, and the rest last.
    """
    seen: set[int] = set()
    groups = []
    for module in (*reversed(list(task.blocks())), task):
        found = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for p in found}  # a parameter that two blocks share belongs to the last
        groups += [[p for p in found if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in found)]
    return groups


class Bucket:
    """Gradients that are averaged by one all-reduce."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], wire: torch.dtype, ranks: int, complete: Callable[[], None]
    ) -> None:
        """
        Args:
            parameters: of one number format and device.
            wire: number format in which 32-bit gradients are sent.
            ranks: number of processes.
            complete: called in the backward pass when the last of the gradients has come.
        """
        self.parameters = parameters
        self.ranks = ranks
        self.complete = complete
        first = parameters[0]
        dtype = wire if first.dtype == torch.float32 else first.dtype
        self.converts = dtype != first.dtype
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=first.device)
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + p.numel())
        # Strides of the parameter, as of channels_last weights: a gradient of other strides would be copied once more.
        self.views = [
            self.buffer.as_strided(p.shape, p.stride(), start) for p, start in zip(parameters, starts, strict=False)
        ]
        if not self.converts:
            for p, view in zip(parameters, self.views, strict=True):
                p.main_grad = view  # who computes a gradient may write it there, as in Megatron-LM
        self.missing: int | None = None  # gradients that have not come; None outside of the last backward pass
        self.work: dist.Work | None = None
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._arrived)

    def expect(self) -> None:
        """A backward pass begins that completes the gradients."""
        self.missing = len(self.parameters)

    def _arrived(self, _: Tensor) -> None:
        if self.missing is None:
            return
        self.missing -= 1
        if self.missing == 0:
            self.complete()

    def fill(self) -> None:
        """After the backward pass. Gradients of what this rank has not used are zero: other ranks may have used it."""
        if self.missing:
            for p in self.parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.missing = 0

    @torch.no_grad()
    def send(self) -> None:
        """Copy the gradients into the buffer, and begin to average it."""
        self.missing = None
        elsewhere = [(p, view) for p, view in zip(self.parameters, self.views, strict=True) if p.grad is not view]
        if elsewhere:
            torch._foreach_copy_([view for _, view in elsewhere], [p.grad for p, _ in elsewhere])
        if not self.converts:
            for p, view in elsewhere:
                p.grad = view
        # NCCL divides by itself. Gloo cannot, and divided first the sums are those of DistributedDataParallel.
        averages = self.buffer.is_cuda
        if not averages:
            self.buffer.div_(self.ranks)
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self.work = dist.all_reduce(self.buffer, operation, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait until the averages are there: on a GPU only the device waits."""
        self.work.wait()
        self.work = None
        if self.converts:
            torch._foreach_copy_([p.grad for p in self.parameters], self.views)
