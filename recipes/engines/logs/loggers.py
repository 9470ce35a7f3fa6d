"""Where figures and images go. A builder checks its keys, and returns what opens the logger when the run begins: dry
runs open none."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.ranges import check_least
from data.system.files import atomic_write
from recipes.engines.logs.mlflow_writer import MLflowWriter
from recipes.engines.logs.tensorboard_files import TensorBoardWriter
from recipes.engines.logs.tracking import mlflow_run
from recipes.engines.logs.wandb_writer import WandBWriter
from recipes.training import stop
from recipes.training.ranks import by_first_rank, is_first_rank, on_all_ranks, rank

OF_SQLITE = {"disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}  # its words for errors of the disk

METHODS = ("figures", "images", "settings", "close")
Writer = TensorBoardWriter | WandBWriter | MLflowWriter
Opener = Callable[[], Writer | None]  # every rank calls it; the first one gets a writer


class RunLoggers:
    """All loggers of a run, of either engine. Only the first rank writes."""

    def __init__(self, openers: Iterable[Opener]) -> None:
        """Open them. Every rank must call it.

        Args:
            openers: what the builders of this file return.
        """
        self._writers: list[Writer] = []
        with self.closed_by_errors():
            for opener in openers:
                if (writer := opener()) is not None:
                    self._writers.append(writer)
            on_all_ranks(self._check)

    def _check(self) -> None:
        """
        Raises:
            ValueError: a logger of one's own lacks a method, or is on another rank, which would write all again.
        """
        for writer in self._writers:
            kind = f"loggers: {type(writer).__name__} ({type(writer).__module__})"
            missing = [name for name in METHODS if not callable(getattr(writer, name, None))]
            if missing:
                raise ValueError(f"{kind} has no method {', '.join(missing)}; define what TensorBoardWriter has")
            if not is_first_rank():
                raise ValueError(f"{kind} is opened on rank {rank()}, too; return None there (is_first_rank)")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures at a batch."""
        for writer in self._writers:
            writer.figures(figures, step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write what was decided at the start of the run."""
        for writer in self._writers:
            writer.settings(settings)

    def log_images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 at a batch."""
        for writer in self._writers:
            writer.images(name, images, step)

    def flush(self) -> None:
        """Write what TensorBoard's files lack. W&B and MLflow do so by themselves within seconds."""
        for writer in self._writers:
            if isinstance(writer, TensorBoardWriter):
                writer.flush()

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Write what is left, and close, once: Composer closes again at the end of the process.

        Args:
            status: of the run, as MLflow names it; KILLED: it stopped and is to be started again.
        """
        with ExitStack() as stack:  # which closes all, also where one fails
            while self._writers:
                stack.callback(self._writers.pop().close, status)

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """A context that an error leaves only when the loggers are closed, with the status that it stands for."""
        try:
            yield
        except BaseException as error:
            self.close("KILLED" if isinstance(error, stop.StartAgain) else "FAILED")
            raise


def tensorboard(run_name: str, output: str, *, flush_every: int = 20) -> Opener:
    """TensorBoard files in <output>/tensorboard.

    Args:
        flush_every: batches between writes to disk.

    Raises:
        ValueError: `flush_every` below 1.
    """
    check_least("tensorboard", 1, flush_every=flush_every)
    folder = Path(output, "tensorboard", run_name)
    return lambda: TensorBoardWriter(folder, flush_every) if is_first_rank() else None


def wandb(
    run_name: str,
    output: str,
    tracked: Callable[[], str],
    *,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
    offline: bool = False,
) -> Opener:
    """Weights & Biases. A resumed run continues the same W&B run, unless it is offline.

    Args:
        project: project that the run belongs to.
        entity: user or team; null: the logged-in user.
        tags: tags of the run.
        offline: write to disk only, to be synchronised later. Each start is then a separate run, because W&B replaces a
            run when another run with the same id is synchronised.
    """

    def begin() -> WandBWriter | None:
        Path(output).mkdir(parents=True, exist_ok=True)  # W&B falls back to the current folder where this is missing
        identifier = tracked()  # by all ranks, whatever the environment of each says
        if not is_first_rank():
            return None
        settings = {"dir": output, "project": project, "name": run_name, "entity": entity, "tags": tags}
        if offline:
            settings["mode"] = "offline"
        elif os.environ.get("WANDB_MODE") not in ("offline", "dryrun") and "WANDB_RUN_ID" not in os.environ:
            settings |= {"id": identifier, "resume": "allow"}
        return WandBWriter(settings)

    return begin


def mlflow(
    run_name: str, output: str, tracked: Callable[[], str], *, experiment: str, tracking_uri: str | None = None
) -> Opener:
    """MLflow. A resumed run continues the same MLflow run.

    Args:
        experiment: experiment that the run belongs to.
        tracking_uri: address of a server or a database; null: MLFLOW_TRACKING_URI, else a database <output>/mlflow.db.
    """

    def begin() -> MLflowWriter | None:
        folder, artifacts = Path(output).resolve(), None
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            artifacts = (folder / "mlartifacts").as_uri()  # MLflow would write images to mlruns/ in the current folder
        identifier = tracked()

        def find() -> str:
            if artifacts is not None:
                make_database(folder / "mlflow.db")
                images_are_here(folder / "mlflow.db", artifacts)
            return mlflow_run(identifier, uri=uri, experiment=experiment, run_name=run_name, artifacts=artifacts)

        run_id = by_first_rank(find)
        return MLflowWriter(uri, run_id) if is_first_rank() else None

    return begin


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
