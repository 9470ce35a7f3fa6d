"""Weights in the precision of autocast, made once or twice per batch instead of once per microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data.system.log import log
from recipes.algorithms.sharding.shard import is_sharded
from recipes.training.lever import Lever
from recipes.training.ranks import world_size
from recipes.training.run import Run


class WorkingWeights(Lever):
    """Keeps the 16-bit copies that autocast makes of the weights over all microbatches of a batch.

    Autocast copies each weight when a layer first needs it, and forgets all copies when its context ends, after the
    forward pass of each microbatch. Here it forgets them when the last backward pass of the batch has ended, before the
    optimizer changes the weights. Results are bit-equal. Copies take 2 bytes per parameter for the whole batch, as they
    do anyhow from each forward pass to its backward pass. With several processes, the last microbatch makes new copies,
    so that gradients are averaged during its backward pass. Where a block is recomputed, PyTorch enters autocast on the
    thread of the backward pass, which on a GPU is another one, and forgets all copies when it leaves.
    """

    def __init__(self, task: nn.Module) -> None:
        """
        Args:
            task: whose weights are kept.
        """
        self.task = task
        self.used = False
        self.keeps = False
        self.with_gradients = True

    def compile(self, run: Run) -> None:
        """Checks that there is something to keep, once the model is sharded."""
        if not any(p.requires_grad and p.dtype == torch.float32 and p.ndim > 1 for p in self.task.parameters()):
            raise ValueError("working_weights: the model trains no 32-bit weight that autocast would copy")
        reason = "FSDP gathers the weights" if is_sharded(self.task) else None
        reason = "the run is in fp32" if run.precision == "fp32" else reason
        if reason:
            log.info(f"working_weights: not used, {reason}")
        else:
            self.used = True
            self.task.register_forward_pre_hook(self._before_call)

    def before_passes(self, run: Run) -> None:
        if self.used and not self.keeps:
            torch.autocast_increment_nesting()  # autocast contexts inside are not the outermost, so they forget nothing
            self.keeps = True

    def before_forward(self, run: Run) -> None:
        # A backward pass runs what the forward passes did last first. It would cast the gradients of copies from an
        # earlier microbatch after all else, and only then could ranks begin to average them.
        if self.keeps and run.last_pass and world_size() > 1:
            torch.clear_autocast_cache()

    def unscale_gradients(self, run: Run) -> None:
        """The last backward pass of the batch has ended; weights change next."""
        if self.keeps:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            self.keeps = False

    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        """Forget copies that were made without gradients, as by a callback: training needs theirs."""
        if torch.is_grad_enabled() != self.with_gradients:
            torch.clear_autocast_cache()
            self.with_gradients = torch.is_grad_enabled()
