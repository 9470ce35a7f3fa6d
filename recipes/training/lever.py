"""Levers make training faster, smaller or more stable, independently of the engine."""

from __future__ import annotations

from recipes.training.hooks import Hooks
from recipes.training.run import Run


class Lever(Hooks):
    """The base class of everything in `recipes.algorithms` that a recipe names.

    Besides the moments that callbacks have, levers act on the model before training, and on complete gradients. At each
    moment they act before callbacks. `recipes.training.levers.Levers` defines the order of all levers of a run.
    """

    def change_modules(self, run: Run) -> None:
        """Change modules of `run.task` in place, before it is sharded and before a checkpoint is loaded.

        Raises:
            ValueError: there is nothing to change, or the run does not support the lever.
        """

    def shard(self, run: Run) -> None:
        """Shard parameters over devices. Only the lever of `training.fsdp` does."""

    def compile(self, run: Run) -> None:
        """Compile modules, which no other lever changes after this."""

    def unscale_gradients(self, run: Run) -> None:
        """All backward passes of the batch are done: divide gradients by the factor that this lever put into them."""

    def average_gradients(self, run: Run) -> None:
        """Average gradients over ranks, if neither DDP nor FSDP does."""

    def clip_gradients(self, run: Run) -> None:
        """Clip the averaged gradients."""

    def before_step(self, run: Run) -> None:
        """The optimizer steps next."""
