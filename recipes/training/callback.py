"""What happens beside training: it watches, draws, writes and logs, and changes nothing that is learned."""

from __future__ import annotations

from recipes.training.clock import Interval
from recipes.training.hooks import Hooks
from recipes.training.run import Run


class Callback(Hooks):
    """The base class of everything in `callbacks`. Callbacks act after levers at each moment."""


class PeriodicCallback(Callback):
    """A callback that acts at an interval, and always at the end of the run.

    Subclasses define `act`, which every rank calls.
    """

    def __init__(self, every: str | None) -> None:
        """
        Args:
            every: a duration such as "500ba"; None: only the end of the run.

        Raises:
            ValueError: not a duration, or not above 0.
        """
        self.due = Interval(every)

    def step_end(self, run: Run) -> None:
        if self.due(run.clock):
            self.act(run)

    def epoch_end(self, run: Run) -> None:
        if self.due(run.clock):
            self.act(run)

    def act(self, run: Run) -> None:
        """Called whenever it is due."""
