"""Lightning's loggers for the descriptions of `recipes.engines.loggers`, called directly and not through its Trainer.

Through the Trainer, figures would be written only every 50 batches, and those of validation under the wrong batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from recipes.engines.loggers import MLflow, TensorBoard, WandB
from recipes.engines.tracking import log_parameters
from recipes.training.ranks import is_first_rank


def lightning_logger(description: TensorBoard | WandB | MLflow, run_name: str) -> Logger:
    """Lightning's logger of a description.

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
    return MLFlowLogger(
        experiment_name=description.experiment,
        run_name=description.run_name,
        tracking_uri=description.tracking_uri,
        run_id=description.run_id,
    )


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
        loggers: Lightning's.
    """

    def __init__(self, descriptions: Iterable[TensorBoard | WandB | MLflow], run_name: str) -> None:
        """
        Args:
            descriptions: see `recipes.engines.loggers`.
            run_name: name of the run.
        """
        self.loggers: list[Logger] = []
        if is_first_rank():
            self.loggers = [lightning_logger(description, run_name) for description in descriptions]

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures at a batch."""
        for logger in self.loggers:
            logger.log_metrics({name: float(value) for name, value in figures.items()}, step=step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write what was decided at the start of the run."""
        for logger in self.loggers:
            if isinstance(logger, MLFlowLogger):
                log_parameters(logger.experiment, logger.run_id, settings)
            else:
                logger.log_hyperparams(dict(settings))

    def log_images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 at a batch."""
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_images(name, images, step, dataformats="NHWC")
            elif isinstance(logger, WandbLogger):
                logger.log_image(key=name, images=list(images), step=step)
            elif isinstance(logger, MLFlowLogger):
                for number, image in enumerate(images):
                    logger.experiment.log_image(logger.run_id, image, key=f"{name}_{number}", step=step)

    def close(self) -> None:
        """Write what is left, and close."""
        for logger in self.loggers:
            logger.finalize("success")
