"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data.log import log
from recipes.training.lever import Lever
from recipes.training.run import Run


def recompute(modules: Sequence[nn.Module]) -> None:
    """Make modules keep only their inputs for the backward pass (Chen et al. 2016), which then calls them once more.

    Modules stay the same objects with the same names. Random numbers of both calls are the same. Without gradients
    nothing changes.
    """
    for module in modules:
        module.forward = _Recomputed(module)


class _Recomputed:
    """A module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        return checkpoint(self._plain, *args, use_reentrant=False, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: algorithms named after this one may give the module another class.
        return type(self.module).forward(self.module, *args, **kwargs)


class ActivationCheckpointing(Lever):
    """Keeps the inputs of a model's blocks and computes what is inside again: a third more work, much less memory."""

    def __init__(self, task: nn.Module, *, every: int = 1) -> None:
        """Blocks are those that the task names: a U-Net's residual and attention blocks, a transformer's layers.

        Args:
            every: 1 for all blocks, 2 for every second one.

        Raises:
            ValueError: every is below 1.
        """
        if every < 1:
            raise ValueError(f"activation_checkpointing: every must be at least 1, got {every}")
        self.task = task
        self.every = every

    def change_modules(self, run: Run) -> None:
        blocks = self.task.recomputed_blocks()[:: self.every]
        if not blocks:
            raise ValueError("activation_checkpointing: the model names no blocks; remove the algorithm")
        recompute(blocks)
        log.info(f"activation_checkpointing: {len(blocks)} blocks")
        run.log_settings({"activation_checkpointing": len(blocks)})
