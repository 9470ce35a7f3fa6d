"""What writes for the descriptions of `recipes.engines.loggers`: Lightning's loggers, and a writer for MLflow.

They are called directly. Through Lightning's Trainer, figures would be written only every 50 batches, and those of
validation under the wrong batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from recipes.engines.loggers import MLflow, TensorBoard, WandB
from recipes.engines.mlflow_writer import MLflowWriter
from recipes.engines.tensorboard_files import outlasts_full_disk
from recipes.training.ranks import is_first_rank


def lightning_logger(description: TensorBoard | WandB | MLflow, run_name: str) -> Logger | MLflowWriter:
    """What writes the figures of a description.

    Args:
        description: see `recipes.engines.loggers`.
        run_name: name of the run.
    """
    if isinstance(description, TensorBoard):
        return FlushedTensorBoard(description.folder, run_name, description.flush_every)
    if isinstance(description, WandB):
        return WandbLogger(
            name=description.run_name,
            save_dir=description.folder,
            project=description.project,
            offline=description.offline,
            entity=description.entity,
            tags=description.tags,
            id=description.run_id,
        )
    return MLflowWriter(description)


class FlushedTensorBoard(TensorBoardLogger):
    """Files in <folder>/<run_name>, where Composer's are too, written to disk at intervals."""

    def __init__(self, folder: str, run_name: str, flush_every: int) -> None:
        """
        Args:
            folder: of all runs' files.
            run_name: name of the run.
            flush_every: number of batches between writes to disk.
        """
        # A version would be a new folder at each resume.
        super().__init__(folder, name=run_name, version="", default_hp_metric=False)
        outlasts_full_disk(self.experiment)
        self.flush_every = flush_every
        self._flushed_at = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if step is not None and step >= self._flushed_at + self.flush_every:
            self.experiment.flush()
            self._flushed_at = step


class RunLoggers:
    """All loggers of a run. Only the first rank writes.

    Attributes:
        loggers: of all descriptions; none on other ranks.
    """

    def __init__(self, descriptions: Iterable[TensorBoard | WandB | MLflow], run_name: str) -> None:
        """
        Args:
            descriptions: see `recipes.engines.loggers`.
            run_name: name of the run.
        """
        self.loggers: list[Logger | MLflowWriter] = []
        if is_first_rank():
            self.loggers = [lightning_logger(description, run_name) for description in descriptions]

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures at a batch."""
        for logger in self.loggers:
            if isinstance(logger, MLflowWriter):
                logger.figures(figures, step)
            else:
                logger.log_metrics({name: float(value) for name, value in figures.items()}, step=step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write what was decided at the start of the run."""
        for logger in self.loggers:
            if isinstance(logger, MLflowWriter):
                logger.settings(settings)
            else:
                logger.log_hyperparams(dict(settings))

    def log_images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 at a batch."""
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_images(name, images, step, dataformats="NHWC")
            elif isinstance(logger, WandbLogger):
                logger.log_image(key=name, images=list(images), step=step)
            else:
                logger.images(name, images, step)

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Write what is left, and close.

        Args:
            status: of the run, as MLflow names it; KILLED: it stopped and is to be started again.
        """
        for logger in self.loggers:
            if isinstance(logger, MLflowWriter):
                logger.close(status)
            else:
                logger.finalize("failed" if status == "FAILED" else "success")
