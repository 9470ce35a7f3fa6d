"""Which implementation computes the attention of diffusers' networks."""

from __future__ import annotations

from typing import Literal

import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from torch import nn

from data.system.log import log
from recipes.models.blocks.attention import AttentionOnViews, FlashProcessor, flash, sdpa, takes, xformers
from recipes.training.lever import Lever
from recipes.training.run import Run

Implementation = Literal["auto", "xformers", "sdpa", "flash", "eager"]
KERNELS = {"xformers": xformers, "sdpa": sdpa, "flash": flash}
# Of diffusers: for blocks with options that `AttentionOnViews` does not know.
PROCESSORS = {
    "xformers": XFormersAttnProcessor, "sdpa": AttnProcessor2_0, "flash": FlashProcessor, "eager": AttnProcessor,
}  # fmt: skip
# They compute the same, so one may take the place of another. A processor of a model's own may compute something else.
ALIKE = (AttentionOnViews, SlicedAttnProcessor, *PROCESSORS.values())


def use_attention(module: nn.Module, implementation: Implementation, on_gpu: bool) -> tuple[int, str]:
    """Set the implementation of attention blocks; returns the number of blocks and the implementation chosen.

    Blocks with a processor of another kind, such as one of the model's own, keep it.

    Args:
        module: a model with attention blocks of diffusers.
        implementation: auto takes xformers if it runs on the GPU here, otherwise PyTorch's
            scaled_dot_product_attention.
        on_gpu: whether the module will run on a GPU.

    Raises:
        ValueError: the model has no such attention block.
    """
    every = [block for block in module.modules() if isinstance(block, Attention)]
    blocks = [block for block in every if type(block.processor) in ALIKE]
    if not blocks:
        own = f", {len(every)} with processors such as {type(every[0].processor).__name__}" if every else ""
        raise ValueError(f"attention: the model has no diffusers attention block to change{own}; remove the lever")
    if implementation == "auto":
        implementation = "sdpa" if why_not_xformers(on_gpu) else "xformers"
    for block in blocks:
        kernel = KERNELS.get(implementation)
        block.set_processor(AttentionOnViews(kernel) if kernel and takes(block) else PROCESSORS[implementation]())
    return len(blocks), implementation


def why_not_xformers(on_gpu: bool) -> str | None:
    """Why xformers' kernels cannot run here, or None where they can."""
    if not on_gpu:
        return "it needs a GPU"
    try:
        from xformers.ops import memory_efficient_attention

        probe = torch.zeros(1, 8, 1, 64, dtype=torch.float16, device="cuda")
        memory_efficient_attention(probe, probe, probe)
    except Exception as error:  # a failed import, a missing symbol or a missing kernel: xformers does not run
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
    return None


class AttentionImplementation(Lever):
    """Chooses the attention implementation before training starts."""

    def __init__(self, *, implementation: Literal["auto", "xformers", "sdpa", "flash", "eager"] = "auto") -> None:
        """See `use_attention`.

        Args:
            implementation: auto takes xformers if it runs on the GPU here, otherwise sdpa, which is PyTorch's
                scaled_dot_product_attention. flash is sdpa without the kernels of cuDNN, which newer versions of
                PyTorch prefer on Hopper and Blackwell.
        """
        self.implementation = implementation

    def check_machine(self, run: Run) -> None:
        reason = why_not_xformers(run.on_gpu) if self.implementation == "xformers" and run.on_gpu else None
        if reason:
            raise ValueError(f"attention: xformers cannot run here ({reason}); use sdpa or auto")

    def change_modules(self, run: Run) -> None:
        if self.implementation == "xformers" and run.on_cpu:
            raise ValueError("attention: xformers' kernels need a GPU; use sdpa or auto")
        count, chosen = use_attention(run.task, self.implementation, run.on_gpu)
        log.info(f"attention: {chosen} in {count} blocks")
        run.log_settings({"attention": chosen})
