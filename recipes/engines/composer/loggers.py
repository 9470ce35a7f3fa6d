"""Composer's loggers for the descriptions of `recipes.engines.loggers`."""

from __future__ import annotations

from typing import Any

from composer.loggers import LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from recipes.engines.loggers import MLflow, TensorBoard, WandB


def composer_logger(description: TensorBoard | WandB | MLflow) -> LoggerDestination:
    """Composer's logger of a description."""
    if isinstance(description, TensorBoard):
        return TensorboardLogger(log_dir=description.folder, flush_interval=description.flush_every)
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
