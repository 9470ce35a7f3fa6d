"""What makes training faster, smaller or steadier, whichever engine runs it."""

from __future__ import annotations

from recipes.training.hooks import Hooks
from recipes.training.run import Run


class Lever(Hooks):
    """The base class of everything in `recipes.algorithms` that a recipe names.

    Beside the moments that callbacks have, levers act on the model before training, and on finished gradients. They act
    before callbacks at each moment. `recipes.training.levers.Levers` holds the order of all levers of a run.
    """

    def change_modules(self, run: Run) -> None:
        """Change modules of `run.task` in place, on the device, before it is sharded and before weights are loaded.

        Raises:
            ValueError: there is nothing to change, or the run cannot have it.
        """

    def shard(self, run: Run) -> None:
        """Divide parameters over devices; only the lever of `training.fsdp` does."""

    def compile(self, run: Run) -> None:
        """Compile what no other lever changes any more."""

    def unscale_gradients(self, run: Run) -> None:
        """All microbatches are done: take this lever's factor out of the gradients."""

    def average_gradients(self, run: Run) -> None:
        """Average gradients that neither DDP nor FSDP has averaged."""

    def clip_gradients(self, run: Run) -> None:
        """Bound the averaged gradients."""

    def before_step(self, run: Run) -> None:
        """The optimizer steps next."""
