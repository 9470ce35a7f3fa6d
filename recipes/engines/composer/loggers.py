"""Composer's loggers for the descriptions of `recipes.engines.loggers`."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

import yaml
from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist

from recipes.engines.composer.run import clock_of
from recipes.engines.loggers import MLflow, TensorBoard, WandB
from recipes.engines.mlflow_writer import MLflowWriter
from recipes.engines.tensorboard_files import outlasts_full_disk
from recipes.training import stop
from recipes.training.ranks import is_first_rank


def composer_logger(description: TensorBoard | WandB | MLflow) -> LoggerDestination:
    """Composer's logger of a description."""
    if isinstance(description, TensorBoard):
        return OneTensorBoardFile(log_dir=description.folder, flush_interval=description.flush_every)
    if isinstance(description, WandB):
        settings: dict[str, Any] = {"dir": description.folder, **({"mode": "offline"} if description.offline else {})}
        if description.run_id is not None:
            settings |= {"id": description.run_id, "resume": "allow"}
        return ContinuedWandB(
            project=description.project,
            entity=description.entity,
            name=description.run_name,
            tags=description.tags,
            init_kwargs=settings,
        )
    return MLflowDestination(description)


class ContinuedWandB(WandBLogger):
    """Logs to a run that may have figures of earlier starts."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """W&B ignores what is logged again after a kill, with a warning at each call."""
        if self._enabled:
            import wandb

            if step is None or step >= wandb.run.step:
                super().log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Settings may change when a run goes on, the names of machines among them."""
        if self._enabled:
            import wandb

            wandb.config.update(hyperparameters, allow_val_change=True)

    def download_file(self, *arguments: Any, **options: Any) -> None:
        """W&B has no checkpoints. Composer would look for one at the first start of a run, and fail without a login.

        Raises:
            FileNotFoundError: Always; Composer takes it for "no checkpoint here".
        """
        raise FileNotFoundError("W&B keeps no checkpoints of these runs")


class MLflowDestination(LoggerDestination):
    """Hands over to `MLflowWriter` on the first rank. Composer's own logger ends a run whose server fails."""

    def __init__(self, description: MLflow) -> None:
        """
        Args:
            description: of the run, which exists.
        """
        self._writer = MLflowWriter(description) if is_first_rank() else None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._writer is not None:
            self._writer.figures(metrics, step or 0)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.settings(hyperparameters)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, *options: Any
    ) -> None:
        """Images are (N, H, W, 3) uint8 arrays."""
        if self._writer is not None:
            self._writer.images(name, images, step or 0)

    def close(self, state: State, logger: Logger) -> None:
        """Composer closes at the end of the process, too, whatever has ended it."""
        if self._writer is not None:
            self._writer.close("FINISHED" if clock_of(state).ended else "KILLED" if stop.stopped() else "FAILED")


class OneTensorBoardFile(TensorboardLogger):
    """One file per start of a run.

    Composer's logger ends its file at each flush, epoch and validation, to upload it, and begins another one; and each
    rank begins one that stays empty. A long run would leave ten thousands of files.
    """

    def _initialize_summary_writer(self) -> None:
        if dist.get_global_rank() == 0:
            super()._initialize_summary_writer()
            outlasts_full_disk(self.writer)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Write settings as texts, nested ones as YAML. Composer would write them into a file of their own, again at
        each validation."""
        for name, value in hyperparameters.items() if self.writer is not None else ():
            nested = isinstance(value, Mapping)
            text = indent(yaml.safe_dump(value, sort_keys=False), 4 * " ") if nested else str(value)  # Markdown's code
            self.writer.add_text(name, text)

    def log_images(self, *args: Any, **kwargs: Any) -> None:
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
