"""One run of W&B or MLflow for all starts of a run: each start would otherwise begin another one there."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.remote.downloads import shown, without_logins
from data.system.files import write_text
from data.system.log import log
from recipes.config.recipe import Recipe
from recipes.engines.record import TRACKED, record_of
from recipes.training.checkpoint_names import has_checkpoints
from recipes.training.ranks import by_first_rank

if TYPE_CHECKING:  # the import takes seconds, and few runs need it
    from mlflow import MlflowClient

TAG = "precompose.run"  # of MLflow's runs
AT_ONCE = 100  # parameters that an MLflow server accepts in one call
LONGEST = 6000  # characters of a parameter's value, by MLflow
SILENT = 5.0  # seconds that a start waits for a server before it says so, and between two questions
PATIENCE = 60.0  # seconds after which it asks no more
# Answers that may be others when the server is asked again: a credential, a time limit, a limit of calls.
PASSING = {401, 403, 408, 429}


def tracked_run(recipe: Recipe) -> str:
    """The identifier of a run: the same at each start that goes on, another one where a run begins.

    It is kept in the run's folder and with each checkpoint. Every rank must call this, after `prepare_folder`.
    """
    return by_first_rank(lambda: _kept_or_new(recipe))


def _kept_or_new(recipe: Recipe) -> str:
    output = Path(recipe.output)
    kept = record_of(recipe) / TRACKED
    identifier = ""
    if recipe.checkpoints.resumes and has_checkpoints(output) and kept.is_file():
        identifier = kept.read_text("utf-8", "replace").strip()
        if not re.fullmatch(r"[0-9a-f]+", identifier):
            log.warning(f"{kept}: damaged; trackers show what follows as a run of its own")
            identifier = ""
    identifier = identifier or secrets.token_hex(8)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / TRACKED, f"{identifier}\n")
    return identifier


def mlflow_run(identifier: str, *, uri: str, experiment: str, run_name: str, artifacts: str | None) -> str:
    """MLflow's id of a run, which is made if there is none yet. MLFLOW_RUN_ID takes precedence. Only the first rank
    calls this.

    A server that does not answer is asked again for a minute, and a line says so.

    Args:
        identifier: of the run; see `tracked_run`.
        uri: address of the server or the database.
        experiment: name of the experiment; it is made if there is none.
        run_name: name that MLflow shows.
        artifacts: address of a new experiment's files; null: MLflow chooses.

    Raises:
        ValueError: the server cannot be reached or refuses it, or the experiment is deleted.
    """
    from mlflow.exceptions import MlflowException

    if given := os.environ.get("MLFLOW_RUN_ID"):
        return given
    ask_once()
    text = f"loggers: waits for MLflow at {shown(uri)}, which has not answered yet"
    waits = threading.Timer(SILENT, log.warning, [text])
    waits.daemon = True
    waits.start()
    end = time.monotonic() + (PATIENCE if uri.startswith("http") else 0)
    try:
        while True:
            try:
                return _found_or_new(identifier, uri, experiment, run_name, artifacts)
            except MlflowException as error:
                if refused(error) or time.monotonic() + SILENT > end:
                    text = without_logins(" ".join(str(error).split()))
                    raise ValueError(f"loggers: MLflow at {shown(uri)}: {text}") from error
            time.sleep(SILENT)
    finally:
        waits.cancel()


def _found_or_new(identifier: str, uri: str, experiment: str, run_name: str, artifacts: str | None) -> str:
    """See `mlflow_run`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        number = client.create_experiment(experiment, artifact_location=artifacts)
    elif found.lifecycle_stage == "deleted":
        raise ValueError(
            f"loggers: the experiment {experiment!r} of {shown(uri)} is deleted; give another `experiment`, or restore "
            f"it with `mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    else:
        number = found.experiment_id
    runs = client.search_runs([number], filter_string=f"tags.`{TAG}` = '{identifier}'", max_results=1)
    if not runs:
        return client.create_run(number, run_name=run_name, tags={TAG: identifier}).info.run_id
    client.update_run(runs[0].info.run_id, status="RUNNING")
    return runs[0].info.run_id


def ask_once() -> None:
    """Make each later call of MLflow ask its server once, unless the user's environment says otherwise.

    It would ask for four minutes within one call, without a word, and draw its pauses from Python's generator of random
    numbers, on which a run may depend. What calls it asks again by itself.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def refused(error: Exception) -> bool:
    """Whether an MLflow server has answered, and would answer the same again."""
    from mlflow.exceptions import MlflowException

    status = error.get_http_status_code() if isinstance(error, MlflowException) else None
    return status is not None and 400 <= status < 500 and status not in PASSING


def log_parameters(client: MlflowClient, run_id: str, settings: Mapping[str, Any]) -> None:
    """Write settings as parameters of an MLflow run. Nested ones are joined with dots.

    MLflow never changes a parameter. One that is another at a later start of a run keeps its first value, and a tag of
    its name has the new one.
    """
    from mlflow.entities import Param, RunTag

    data = client.get_run(run_id).data
    before = data.params | {name: value for name, value in data.tags.items() if name in data.params}
    now = {re.sub(r"[^\w/. :-]", "_", name): str(value)[:LONGEST] for name, value in flat(settings)}
    new = [Param(name, value) for name, value in now.items() if name not in before]
    changed = [RunTag(name, value) for name, value in now.items() if before.get(name, value) != value]
    for items, kind in ((new, "params"), (changed, "tags")):
        for start in range(0, len(items), AT_ONCE):
            client.log_batch(run_id, **{kind: items[start : start + AT_ONCE]})


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Names, joined with dots, and values of nested settings. A mapping without keys is a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
