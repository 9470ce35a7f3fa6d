"""Activation checkpointing: activations are recomputed in the backward pass instead of being stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from data.system.log import log
from recipes.training.lever import Lever
from recipes.training.run import Run


def recompute(modules: Sequence[nn.Module]) -> None:
    """Make modules store only their inputs for the backward pass, which then runs their forward a second time.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Modules stay the same objects with the
    same names. Both calls draw the same random numbers, and have the same buffers, such as the statistics of norms,
    which the first one alone changes. Nothing changes where gradients are disabled.
    """
    for module in dict.fromkeys(modules):
        module.forward = _Recomputed(module)


def recomputed_modules(module: nn.Module) -> list[nn.Module]:
    """The modules inside of a module that `recompute` has changed."""
    return [inner for inner in module.modules() if isinstance(vars(inner).get("forward"), _Recomputed)]


class _Recomputed:
    """A module's forward under `torch.utils.checkpoint`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = vars(module).get("forward")  # of the object, in place of that of its class
        self.changing: list[_Buffer] | None = None  # found by the first call in training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        if torch.compiler.is_compiling():  # the graph has the kernels of both passes
            return checkpoint(self._plain, *args, use_reentrant=False, **kwargs)
        kernels = _attention_kernels()
        before = {buffer: buffer.value().clone() for buffer in self._buffers()}

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            # PyTorch recomputes under the autocast of the first pass, but with any kernel of attention.
            return nullcontext(), _as_before(kernels, before)

        result = checkpoint(self._plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if self.changing is None and self.module.training:
            self.changing = [buffer for buffer, value in before.items() if buffer.differs(value)]
            for buffer in before.keys() - set(self.changing):
                del before[buffer]
        return result

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        # Looked up at each call: a lever that the recipe names later may change the class of the module.
        return type(self.module).forward(self.module, *args, **kwargs)

    def _buffers(self) -> list[_Buffer]:
        """The buffers that calls in training change; before the first one, all that there are."""
        if not self.module.training:
            return []
        if self.changing is not None:
            return self.changing
        return [
            _Buffer(module, name)
            for module in self.module.modules()
            for name, value in module._buffers.items()
            if value is not None and not value.is_meta
        ]


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module, which may be replaced by another tensor."""

    module: nn.Module
    name: str

    def value(self) -> Tensor:
        return self.module._buffers[self.name]

    def differs(self, before: Tensor) -> bool:
        """Whether it has other values than before. Kernels of BatchNorm change theirs without a new version."""
        now = self.value()
        same_kind = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
        return not (same_kind and torch.equal(now, before))


@contextmanager
def _as_before(kernels: list[SDPBackend], before: dict[_Buffer, Tensor]) -> Iterator[None]:
    """The context of a recomputation: the kernels of the first pass, and the buffers from before it.

    Power iterations of spectral norms, for example, would otherwise give another weight than in the first pass.
    """
    after = {buffer: buffer.value() for buffer in before}
    for buffer, value in before.items():
        buffer.module._buffers[buffer.name] = value.clone()
    try:
        with sdpa_kernel(kernels):
            yield
    finally:
        for buffer, value in after.items():
            buffer.module._buffers[buffer.name] = value


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
