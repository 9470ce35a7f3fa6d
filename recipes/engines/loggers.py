"""Where figures and images go: descriptions that each engine makes its own loggers of."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from data.files import atomic_write
from data.ranges import check_least
from recipes.engines.tracking import mlflow_run
from recipes.training.ranks import by_first_rank

OF_SQLITE = {"disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}  # its words for errors of the disk


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
    """Weights & Biases; attributes as the arguments of `wandb`, and the run's name and folder.

    Attributes:
        run_id: of the run that is continued, or begun if there is none; None: W&B chooses.
    """

    folder: str
    project: str
    run_name: str
    run_id: str | None
    entity: str | None
    tags: list[str] | None
    offline: bool


@dataclass(frozen=True)
class MLflow:
    """MLflow.

    Attributes:
        run_name: name of the run.
        experiment: that it belongs to.
        tracking_uri: an address or a local database.
        run_id: of the run, which exists.
    """

    run_name: str
    experiment: str
    tracking_uri: str
    run_id: str


def tensorboard(output: str, *, flush_every: int = 20) -> TensorBoard:
    """TensorBoard files in <output>/tensorboard.

    Args:
        flush_every: batches between writes to disk.

    Raises:
        ValueError: `flush_every` below 1.
    """
    check_least("tensorboard", 1, flush_every=flush_every)
    return TensorBoard(f"{output}/tensorboard", flush_every)


def wandb(
    run_name: str,
    output: str,
    tracked: Callable[[], str],
    *,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
    offline: bool = False,
) -> WandB:
    """Weights & Biases. A resumed run continues the same W&B run, unless it is offline.

    Args:
        project: project that the run belongs to.
        entity: user or team; null: the logged-in user.
        tags: tags of the run.
        offline: write to disk only, to be synchronised later. Each start is then a run of its own, because W&B
            replaces a run when another one with its id is synchronised.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # W&B falls back to the current folder where this is missing
    identifier = tracked()  # by all ranks, whatever the environment of each says
    alone = offline or os.environ.get("WANDB_MODE") in ("offline", "dryrun") or "WANDB_RUN_ID" in os.environ
    return WandB(output, project, run_name, None if alone else identifier, entity, tags, offline)


def mlflow(
    run_name: str, output: str, tracked: Callable[[], str], *, experiment: str, tracking_uri: str | None = None
) -> MLflow:
    """MLflow. A resumed run continues the same MLflow run.

    Args:
        experiment: experiment that the run belongs to.
        tracking_uri: address of a server or a database; null: MLFLOW_TRACKING_URI, else a database <output>/mlflow.db.
    """
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None
    if tracking_uri is None:
        folder = Path(output).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tracking_uri = f"sqlite:///{folder / 'mlflow.db'}"
        artifacts = (folder / "mlartifacts").as_uri()  # MLflow would write images to mlruns/ in the current folder
    identifier = tracked()

    def find() -> str:
        if artifacts is not None:
            make_database(folder / "mlflow.db")
            images_are_here(folder / "mlflow.db", artifacts)
        return mlflow_run(
            identifier, uri=tracking_uri, experiment=experiment, run_name=run_name, artifacts=artifacts
        )

    return MLflow(run_name, experiment, tracking_uri, by_first_rank(find))


def make_database(path: Path) -> None:
    """Make MLflow's database, unless it is there. MLflow refuses one for ever whose making was broken off.

    Raises:
        OSError: of the disk.
    """
    if path.is_file():
        return
    from mlflow import MlflowClient

    with atomic_write(path) as partial:
        try:
            MlflowClient(f"sqlite:///{partial}").search_experiments(max_results=1)
        except Exception as error:  # SQLAlchemy's, or MLflow's around it
            number = next((number for text, number in OF_SQLITE.items() if text in str(error)), None)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(partial)) from error


def images_are_here(database: Path, artifacts: str) -> None:
    """Tell a database whose folder has been moved or copied where its images are: MLflow keeps their addresses, and
    would go on to write into the former folder.

    Args:
        database: of the run's folder.
        artifacts: address of its images.
    """
    ours = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE '%/mlartifacts'"
    columns = {"experiments": "artifact_location", "runs": "artifact_uri"}
    # What is wrong with a database, MLflow says.
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(database)) as connection, connection:
        for (former,) in connection.execute(ours).fetchall():
            size = len(former)
            for table, column in columns.items() if former != artifacts else ():
                change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                connection.execute(change, (artifacts, size + 1, size, former))
