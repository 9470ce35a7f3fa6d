"""Callbacks watch a run, write files and log; they do not change what is learned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from recipes.training.clock import Clock, Interval
from recipes.training.hooks import Hooks
from recipes.training.ranks import from_first_rank
from recipes.training.run import Run


class Callback(Hooks):
    """The base class of callbacks. Each hook is called on callbacks after levers.

    Attributes:
        alone: whether a run has at most one of the class: the files or figures of two would have the same names.
    """

    alone: ClassVar[bool] = False

    def is_complete(self, clock: Clock) -> bool:
        """Whether everything that `end` writes is there. A run that was killed at its end is otherwise ended again."""
        return True


class PeriodicCallback(Callback):
    """A callback that acts at intervals, and at the end of the run.

    Subclasses define `act`, which runs on every rank, after a checkpoint that is due has been saved.
    """

    def __init__(self, every: str | None) -> None:
        """
        Args:
            every: interval, such as "500ba"; None: only at the end of the run.

        Raises:
            ValueError: not a duration, or not above 0; or the subclass has no `act`, nor another hook.
        """
        kind, hooks = type(self), ("act", *(name for name in vars(Hooks) if not name.startswith("_")))
        if all(getattr(kind, name) is getattr(PeriodicCallback, name) for name in hooks):
            raise ValueError(f"{kind.__name__} ({kind.__module__}) does nothing: define its method act(run)")
        self.due = Interval(every)

    def after_save(self, run: Run) -> None:
        if self.due(run.clock):
            self.act(run)

    def act(self, run: Run) -> None:
        """Called on every rank whenever the interval has passed, and at the end of the run."""


def is_complete(callbacks: Iterable[Callback], clock: Clock) -> bool:
    """Whether a run that has reached its length has nothing left to write. Every rank must call it."""
    return from_first_rank(all(callback.is_complete(clock) for callback in callbacks))
