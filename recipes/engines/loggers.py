"""Where figures and images go: descriptions that each engine makes its own loggers of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard files.

    Attributes:
        folder: of the files.
        flush_every: batches between writes to disk.
    """

    folder: str
    flush_every: int


@dataclass(frozen=True)
class WandB:
    """Weights & Biases; attributes as the arguments of `wandb`, and the run's name and folder."""

    folder: str
    project: str
    run_name: str
    entity: str | None
    tags: list[str] | None
    offline: bool


@dataclass(frozen=True)
class MLflow:
    """MLflow; `tracking_uri` is an address or a local database."""

    run_name: str
    experiment: str
    tracking_uri: str


def tensorboard(output: str, *, flush_every: int = 20) -> TensorBoard:
    """TensorBoard files in <output>/tensorboard.

    Args:
        flush_every: batches between writes to disk.
    """
    return TensorBoard(f"{output}/tensorboard", flush_every)


def wandb(
    run_name: str,
    output: str,
    *,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
    offline: bool = False,
) -> WandB:
    """Weights & Biases.

    Args:
        project: project that the run belongs to.
        entity: user or team; null: the logged-in user.
        tags: tags of the run.
        offline: write to disk only, to be synchronised later.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # W&B falls back to the current folder where this is missing
    return WandB(output, project, run_name, entity, tags, offline)


def mlflow(run_name: str, output: str, *, experiment: str, tracking_uri: str | None = None) -> MLflow:
    """MLflow.

    Args:
        experiment: experiment that the run belongs to.
        tracking_uri: address of a server or a database; null: MLFLOW_TRACKING_URI, else a database <output>/mlflow.db.
    """
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if tracking_uri is None:
        Path(output).mkdir(parents=True, exist_ok=True)
        tracking_uri = f"sqlite:///{Path(output, 'mlflow.db').resolve()}"
    return MLflow(run_name, experiment, tracking_uri)
