"""The data workers of a run with Composer end with it."""

from __future__ import annotations

from composer import Callback, State
from composer.loggers import Logger

from recipes.engines.parts import Parts


class EndWorkers(Callback):
    """Ends all data workers when the Trainer is closed, which itself leaves those of validation sets."""

    def __init__(self, parts: Parts) -> None:
        """
        Args:
            parts: of the run.
        """
        self._parts = parts

    def close(self, state: State, logger: Logger) -> None:
        self._parts.end_workers()
