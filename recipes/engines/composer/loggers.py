"""Composer's loggers for the descriptions of `recipes.engines.loggers`."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import dist

from recipes.engines.loggers import MLflow, TensorBoard, WandB


def composer_logger(description: TensorBoard | WandB | MLflow) -> LoggerDestination:
    """Composer's logger of a description."""
    if isinstance(description, TensorBoard):
        return OneTensorBoardFile(log_dir=description.folder, flush_interval=description.flush_every)
    if isinstance(description, WandB):
        settings: dict[str, Any] = {"dir": description.folder, **({"mode": "offline"} if description.offline else {})}
        return WandBLogger(
            project=description.project,
            entity=description.entity,
            name=description.run_name,
            tags=description.tags,
            init_kwargs=settings,
        )
    return MLFlowLogger(
        experiment_name=description.experiment,
        run_name=description.run_name,
        tracking_uri=description.tracking_uri,
        log_system_metrics=False,
    )


class OneTensorBoardFile(TensorboardLogger):
    """One file per start of a run.

    Composer's logger ends its file at each flush, epoch and validation, to upload it, and begins another one; and each
    rank begins one that stays empty. A long run would leave ten thousands of files.
    """

    def _initialize_summary_writer(self) -> None:
        if dist.get_global_rank() == 0:
            super()._initialize_summary_writer()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Write settings as texts. Composer would write them into a file of their own, again at each validation."""
        for name, value in hyperparameters.items() if self.writer is not None else ():
            self.writer.add_text(name, str(value))

    def log_images(self, *args: Any, **kwargs: Any) -> None:
        """See `LoggerDestination`."""
        if self.writer is not None:
            super().log_images(*args, **kwargs)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Write to the disk what was logged."""
        self._flush(logger)

    def _flush(self, logger: Logger) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
