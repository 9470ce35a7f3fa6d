"""The order in which the levers of a run act, in one place for all engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.training.hooks import by_names_of_states
from recipes.training.lever import Lever
from recipes.training.run import Run
from recipes.training.watchdog import alive


class Levers:
    """All levers of a run. Each hook is called on them in the order in which the recipe names them."""

    def __init__(self, levers: Sequence[Lever], first: Sequence[Lever] = (), last: Sequence[Lever] = ()) -> None:
        """
        Args:
            levers: of the recipe, in its order.
            first: levers that no recipe names. They act before the others and have no state in checkpoints.
            last: the same, but they act after the others.
        """
        self._levers = list(levers)
        self._first = list(first)
        self._last = list(last)

    def __iter__(self) -> Iterator[Lever]:
        """The levers of the recipe."""
        return iter(self._levers)

    def by_names_of_states(self) -> dict[str, Lever]:
        """The levers of the recipe by the names of their states in checkpoints."""
        return by_names_of_states((lever.label_in_recipe, lever) for lever in self._levers)

    @property
    def average(self) -> bool:
        """Whether one of them averages gradients in place of DistributedDataParallel."""
        return any(lever.averages for lever in self._levers)

    def prepare(self, run: Run) -> None:
        """Change and shard the task. The optimizer has the new parameters afterwards; checkpoints are loaded later."""
        self.call("check_machine", run)
        self.call("change_modules", run)
        self.call("shard", run)

    def compile(self, run: Run) -> None:
        """Compile after all other changes: compiled forwards call the modules as they are now."""
        self.call("compile", run)

    def finish_gradients(self, run: Run) -> None:
        """Unscale, average and clip gradients: everything between the last backward pass and the optimizer's step."""
        self.call("unscale_gradients", run)
        self.call("average_gradients", run)
        self.call("clip_gradients", run)
        self.call("before_step", run)

    def call(self, hook: str, run: Run) -> None:
        """Call a hook, the method of `Lever` with this name, on all levers."""
        alive(hook, run)
        for lever in (*self._first, *self._levers, *self._last):
            getattr(lever, hook)(run)
