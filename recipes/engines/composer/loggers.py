"""A run's loggers as Composer's."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination

from recipes.engines.logs.loggers import RunLoggers
from recipes.training import stop


class Destination(LoggerDestination):
    """Hands over to the loggers of a run.

    Composer's own for TensorBoard begins another file at each flush, epoch and validation, its own for W&B looks there
    for checkpoints, and its own for MLflow ends a run whose server fails.
    """

    def __init__(self, loggers: RunLoggers) -> None:
        """
        Args:
            loggers: of the run.
        """
        self._loggers = loggers

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._loggers.log(metrics, step or 0)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._loggers.log_settings(hyperparameters)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, *options: Any
    ) -> None:
        """Images are (N, H, W, 3) uint8 arrays."""
        self._loggers.log_images(name, images, step or 0)

    def fit_end(self, state: State, logger: Logger) -> None:
        """The run is finished: Composer calls loggers after all callbacks, and not if one of them fails. An error of a
        logger ends the run here; one of `close`, Composer would only print."""
        self._loggers.close("FINISHED")

    def close(self, state: State, logger: Logger) -> None:
        """Composer closes at the end of the process, too, whatever has ended it."""
        self._loggers.close("KILLED" if stop.stopped() else "FAILED")
