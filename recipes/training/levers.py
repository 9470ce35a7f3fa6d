"""The order in which all levers of a run act. Both engines go through it, and nothing else decides an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.training.lever import Lever
from recipes.training.run import Run


class Levers:
    """All levers of a run.

    Levers of one kind act in the order in which the recipe names them.
    """

    def __init__(self, levers: Sequence[Lever]) -> None:
        self._levers = list(levers)

    def __iter__(self) -> Iterator[Lever]:
        return iter(self._levers)

    def prepare(self, run: Run) -> None:
        """Make the built task the one that is trained. A checkpoint's weights are loaded afterwards."""
        self._each("change_modules", run)
        self._each("shard", run)

    def compile(self, run: Run) -> None:
        """The last change before weights are loaded: compiled forwards call what is there now."""
        self._each("compile", run)

    def finish_gradients(self, run: Run) -> None:
        """From the last backward pass of a batch to the optimizer's step."""
        self._each("unscale_gradients", run)
        self._each("average_gradients", run)
        self._each("clip_gradients", run)
        self._each("before_step", run)

    def at(self, moment: str, run: Run) -> None:
        """A moment of `recipes.training.hooks.Hooks`."""
        self._each(moment, run)

    def _each(self, moment: str, run: Run) -> None:
        for lever in self._levers:
            getattr(lever, moment)(run)
