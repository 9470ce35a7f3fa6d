"""Low-rank averaging of gradients between the processes of a run (PowerSGD), after the backward pass."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from recipes.algorithms.blocks import block_matrices
from recipes.algorithms.clipping import ClipByNorm
from recipes.algorithms.formats import FLOAT_32, MEAN_1_6_9
from recipes.algorithms.gradient_order import GradientStage
from recipes.algorithms.low_rank import BlockState, LowRank, agree, reduce_others

FORMATS = {"1-6-9": MEAN_1_6_9, "32-bit": FLOAT_32}


class PowerSGD(Algorithm):
    """Averages the gradients of the blocks' matrices as products of two thin matrices (Ramesh et al. 2021, E.2).

    For data-parallel runs without sharding: each process is a machine. DistributedDataParallel's own averaging is
    turned off, and when all microbatches are done each block is compressed, sent and decompressed, one after another.
    Gains, biases, embeddings and unembeddings are averaged in 32-bit.
    """

    gradient_stage = GradientStage.AVERAGE

    def __init__(
        self,
        task: nn.Module,
        *,
        rank: int,
        wire: Literal["1-6-9", "32-bit"] = "1-6-9",
        buffer: Literal["1-6-9", "32-bit"] = "1-6-9",
        p_scale: float = 1.0,
        q_scale: float = 1.0,
        clip: float | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            rank: columns of the thin matrices (the paper: 512 to 896 over 8 shards, about a quarter of the width).
            wire: format in which they are sent.
            buffer: format of what has not been sent yet, which is added to the next gradient.
            p_scale: what P is multiplied by on the wire; 1-6-9 holds magnitudes from 2^-68 to just below 16.
            q_scale: the same for Q.
            clip: largest norm of the averaged gradient, computed from Q; null: none. In place of training.grad_clip.
            seed: of the fixed Gaussian Q.

        Raises:
            ValueError: values out of range, a model without blocks.
        """
        if rank < 1 or p_scale <= 0 or q_scale <= 0 or (clip is not None and clip <= 0):
            raise ValueError(
                f"powersgd: rank must be at least 1, scales and clip above 0; got rank {rank}, p_scale {p_scale}, "
                f"q_scale {q_scale}, clip {clip}"
            )
        self.blocks = [matrices for matrices in block_matrices(task, "powersgd") if matrices]
        inside = {id(p) for matrices in self.blocks for p in matrices}
        self.others = [p for p in task.parameters() if p.requires_grad and id(p) not in inside]
        self.names = {id(p): name for name, p in task.named_parameters()}
        self.compressor = LowRank(
            rank, seed=seed, wire=FORMATS[wire], buffer=FORMATS[buffer], p_scale=p_scale, q_scale=q_scale
        )
        self.clip = clip
        self.states: list[BlockState] = []
        self.loaded: dict[str, Tensor] | None = None
        self.skipped = 0

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.FIT_START:
            self._begin(state)
        else:
            logger.log_metrics(self._average(state))

    def _begin(self, state: State) -> None:
        if self.states:  # a second fit of the same trainer
            return
        if not isinstance(state.model, DistributedDataParallel):
            raise ValueError(
                "powersgd: the model is not under DistributedDataParallel: there is one process, or its parameters are "
                "sharded; remove powersgd, or start several processes without sharding"
            )
        if state.precision == Precision.AMP_FP16:
            raise ValueError("powersgd: gradients are scaled under training.precision amp_fp16; use amp_bf16 or fp32")
        if self.clip is not None and any(isinstance(a, ClipByNorm) for a in state.algorithms):
            raise ValueError("powersgd: clip and training.grad_clip would both clip; set one of them to null")
        state.model.register_comm_hook(None, _leave_as_it_is)
        for number, matrices in enumerate(self.blocks):
            shapes = [p.shape for p in matrices]
            self.states.append(self.compressor.new_state(shapes, matrices[0].device, number))
        if self.loaded is not None:
            for matrices, block_state in zip(self.blocks, self.states, strict=True):
                sums = [self.loaded[self.names[id(p)]] for p in matrices]
                self.compressor.load_errors(block_state, sums, dist.get_world_size())
            self.loaded = None
        self._report()

    def _report(self) -> None:
        machines = dist.get_world_size()
        sent = sum(self.compressor.bytes_sent([p.shape for p in m], machines) for m in self.blocks)
        plain = sum(2 * (machines - 1) / machines * 4 * p.numel() for m in self.blocks for p in m)
        if dist.get_rank() == 0:
            print(
                f"powersgd: {sum(map(len, self.blocks))} matrices in {len(self.blocks)} blocks, "
                f"{sent:,.0f} bytes sent a step and process in place of {plain:,.0f}",
                flush=True,
            )

    def _average(self, state: State) -> dict[str, float]:
        """Steps 1 to 8, for all blocks."""
        group, machines = dist.group.WORLD, dist.get_world_size()
        compressed = [
            self.compressor.compress([_gradient(p) for p in matrices], machines, block_state, group)
            for matrices, block_state in zip(self.blocks, self.states, strict=True)
        ]
        others = [_gradient(p) for p in self.others]
        reduce_others(others, machines, group)
        agreed = agree(compressed, others, group)
        factor = None
        if self.clip is not None:
            factor = (self.clip / agreed.norm).clamp(max=1.0)
            for gradient in others:
                gradient.mul_(factor)
        for block, sent, block_state in zip(compressed, agreed.sent, self.states, strict=True):
            self.compressor.finish(block, sent, block_state, machines, factor)
        norm = agreed.norm.item()
        if norm == float("inf"):  # on every process alike
            self.skipped += 1
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)  # without gradients the optimizer changes nothing
        return {"powersgd/norm": norm, "powersgd/skipped": self.skipped}

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sums of all processes' errors, by parameter: they load on another number of processes."""
        saved = super().state_dict()
        if not self.states:
            return saved
        errors = {}
        for matrices, block_state in zip(self.blocks, self.states, strict=True):
            sums = self.compressor.summed_errors(block_state, dist.group.WORLD)
            errors |= {self.names[id(p)]: total for p, total in zip(matrices, sums, strict=True)}
        settings = {"rank": self.compressor.rank, "seed": self.compressor.seed}
        return saved | {"errors": errors, "skipped": self.skipped, **settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the sums over; each process gets its share when training starts.

        Raises:
            ValueError: Q would be another, or the matrices are of another model.
        """
        if "errors" not in state:
            return
        for key in ("rank", "seed"):
            if state[key] != getattr(self.compressor, key):
                raise ValueError(
                    f"powersgd: the checkpoint was written with {key} {state[key]}, the recipe says "
                    f"{getattr(self.compressor, key)}; another Q in the middle of a run hurts it"
                )
        wanted = {self.names[id(p)] for matrices in self.blocks for p in matrices}
        wrong = sorted(wanted ^ set(state["errors"]))
        if wrong:
            raise ValueError(f"powersgd: the checkpoint's errors are of other matrices: {wrong[0]}")
        self.loaded = state["errors"]
        self.skipped = state["skipped"]


def _leave_as_it_is(_, bucket):  # untyped: DistributedDataParallel refuses annotations that are strings
    """A hook for DistributedDataParallel that averages nothing."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # not used in this batch; others may have
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
