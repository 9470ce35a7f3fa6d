"""Blocks of diffusers' networks without copies and divisions that change nothing."""

from __future__ import annotations

from torch import nn

from data.system.log import log
from recipes.models.blocks.lean import make_lean
from recipes.training.lever import Lever
from recipes.training.run import Run


class LeanBlocks(Lever):
    """Removes needless work of diffusers' blocks: copies between memory formats, divisions by 1, separate biases."""

    def __init__(self, task: nn.Module) -> None:
        """See `recipes.models.blocks.lean`."""
        self.task = task

    def change_modules(self, run: Run) -> None:
        count = make_lean(self.task)
        log.info(f"lean_blocks: {count} blocks")
        run.log_settings({"lean_blocks": count})
