"""Activation checkpointing: activations are recomputed in the backward pass instead of being stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from data.system.log import log
from recipes.training.lever import Lever
from recipes.training.run import Run


def recompute(modules: Sequence[nn.Module]) -> None:
    """Make modules store only their inputs for the backward pass, which then runs their forward a second time.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Modules stay the same objects with the
    same names. Both calls draw the same random numbers. Nothing changes where gradients are disabled.
    """
    for module in modules:
        module.forward = _Recomputed(module)


def recomputed_modules(module: nn.Module) -> list[nn.Module]:
    """The modules inside of a module that `recompute` has changed."""
    return [inner for inner in module.modules() if isinstance(vars(inner).get("forward"), _Recomputed)]


class _Recomputed:
    """A module's forward under `torch.utils.checkpoint`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        if torch.compiler.is_compiling():  # the graph has the kernels of both passes
            return checkpoint(self._plain, *args, use_reentrant=False, **kwargs)
        kernels = _attention_kernels()

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            # PyTorch recomputes under the autocast of the first pass, but with any kernel of attention.
            return nullcontext(), sdpa_kernel(kernels)

        return checkpoint(self._plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: a lever that the recipe names later may change the class of the module.
        return type(self.module).forward(self.module, *args, **kwargs)


def _attention_kernels() -> list[SDPBackend]:
    """Those of which PyTorch's attention takes one at this moment."""
    allowed = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    return [kernel for kernel, on in allowed.items() if on]


class ActivationCheckpointing(Lever):
    """Stores only the inputs of a model's blocks and recomputes the rest: a third more compute, much less memory."""

    def __init__(self, task: nn.Module, *, every: int = 1) -> None:
        """
        Args:
            task: its `recomputed_blocks()` are checkpointed: residual and attention blocks of a U-Net, attention and
                MLP of a transformer's layers.
            every: 1: all blocks; 2: every second one; and so on.

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
            raise ValueError("activation_checkpointing: the model names no blocks; remove the lever")
        recompute(blocks)
        log.info(f"activation_checkpointing: {len(blocks)} blocks")
        run.log_settings({"activation_checkpointing": len(blocks)})
