"""One run of a tracking server for all starts of a run."""

import importlib
import os
import sys
from types import SimpleNamespace

import pytest

from data.system.disk_errors import disk_error
from recipes.engines.logs import loggers, tracking
from recipes.engines.logs.tracking import AT_ONCE, TAG, flat, log_parameters, mlflow_run, tracked_run
from recipes.engines.parts import context_of
from recipes.engines.record import TRACKED
from recipes.engines.resuming import prepare_folder
from tests.disks import small_files

MLFLOW = "loggers={mlflow: {name: mlflow, experiment: test}}"


def client_of(folder):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def start(folder):
    """What a start of a run does that logs to MLflow."""
    loggers.mlflow("run", str(folder), lambda: "one", experiment="test")().close("KILLED")


def runs_of(folder):
    client = client_of(folder)
    return client.search_runs([client.get_experiment_by_name("test").experiment_id])


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_run_that_goes_on_is_one_run_in_mlflow(engine, quick_recipe, tmp_path, monkeypatch):
    """Its parameters are the recipe's; what has changed is a tag; its images are in the folder of the run."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # MLflow's own default for images
    output = tmp_path / "run"
    samples = "callbacks.samples={name: sample_grid, prompts: [a dog], every: 4ba, steps: 1}"
    common = [f"training.engine={engine}", "checkpoints.autoresume=true", "checkpoints.every=2ba", MLFLOW, samples]
    for duration in ("2ba", "4ba"):
        importlib.import_module(f"recipes.engines.{engine}.trainer").train(
            quick_recipe(output, *common, f"training.duration={duration}")
        )
    (run,) = runs_of(output)
    assert run.info.status == "FINISHED" and run.info.run_name == quick_recipe(output).run_name
    assert run.data.params["recipe.optimizer.lr"] == "0.002"
    assert run.data.params["recipe.training.duration"] == "2ba" and run.data.tags["recipe.training.duration"] == "4ba"
    losses = client_of(output).get_metric_history(run.info.run_id, "loss/train/total")
    assert sorted({loss.step for loss in losses}) in ([0, 1, 2, 3], [1, 2, 3, 4])
    assert list((output / "mlartifacts").rglob("*.png")) and not (tmp_path / "mlruns").exists()


def test_a_full_disk_leaves_no_half_of_a_database(tmp_path, monkeypatch):
    """MLflow would refuse it at every later start."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    child = os.fork()  # MLflow keeps what it has opened until its process ends
    if not child:
        with small_files(300_000):
            try:
                start(tmp_path)
            except BaseException as error:
                found = disk_error(error)
                os._exit(7 if found is not None and found.filename == str(tmp_path / "mlflow.db") else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and not list(tmp_path.iterdir())
    start(tmp_path)
    assert len(runs_of(tmp_path)) == 1


def test_images_of_a_folder_that_was_moved_are_in_the_new_one(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = []
    for name in ("first", "second"):
        if found:
            (tmp_path / "first").rename(tmp_path / "second")
        start(tmp_path / name)
        (run,) = runs_of(tmp_path / name)
        found.append(run.info.run_id)
        here = (tmp_path / name / "mlartifacts").as_uri()
        assert run.info.artifact_uri == f"{here}/{run.info.run_id}/artifacts"
        assert client_of(tmp_path / name).get_experiment_by_name("test").artifact_location == here
    assert found[0] == found[1] and not (tmp_path / "first").exists()


def test_the_identifier_goes_on_with_the_checkpoints(quick_recipe, tmp_path):
    """And is another one for a run that begins, whatever a start before has left."""
    recipe = quick_recipe(tmp_path, "checkpoints.autoresume=true")
    identifiers = {tracked_run(recipe), tracked_run(recipe)}  # the first was killed before it had a checkpoint
    assert len(identifiers) == 2
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba2-rank0.pt").touch()
    prepare_folder(recipe, "composer")  # which copies the record for the checkpoint
    last = (tmp_path / TRACKED).read_text().strip()
    assert tracked_run(recipe) == last in identifiers
    (tmp_path / TRACKED).unlink()  # another machine, which has fetched the checkpoint and its record
    assert tracked_run(recipe) == last == (tmp_path / TRACKED).read_text().strip()
    assert tracked_run(quick_recipe(tmp_path, "checkpoints.autoresume=false")) not in identifiers


@pytest.mark.parametrize("content", [b"", b"0123\xb4567\n"])
def test_a_damaged_identifier_is_said_and_replaced(content, quick_recipe, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba2-rank0.pt").touch()
    (tmp_path / TRACKED).write_bytes(content)
    new = tracked_run(quick_recipe(tmp_path, "checkpoints.autoresume=true"))
    assert len(new) == 16 and new == (tmp_path / TRACKED).read_text().strip()
    assert f"{tmp_path / TRACKED}: damaged; trackers show" in capsys.readouterr().out


def test_all_loggers_of_a_run_know_it_by_the_same_identifier(quick_recipe, tmp_path):
    """The next start goes on with one identifier, and would begin another run where a logger had another one."""
    tracked = context_of(quick_recipe(tmp_path), None, None)["tracked"]
    assert tracked() == tracked() == (tmp_path / TRACKED).read_text().strip()


def test_wandb_goes_on_where_it_can(tmp_path, monkeypatch):
    """Offline, a run that is synchronised replaces another one of its id. A user's own id is left alone."""
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=None, init=lambda **settings: settings.get("id")))

    def run_id(**arguments):
        return loggers.wandb("short", str(tmp_path), lambda: "abc", project="test", **arguments)()._run

    assert run_id() == "abc" and run_id(offline=True) is None
    for name, value in {"WANDB_MODE": "offline", "WANDB_RUN_ID": "mine"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert run_id() is None


def test_mlflow_runs_are_found_by_their_identifiers(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    client = client_of(tmp_path)

    def run(identifier, experiment="test"):
        return mlflow_run(
            identifier, uri=client.tracking_uri, experiment=experiment, run_name="short", artifacts=tmp_path.as_uri()
        )

    first = run("a")
    client.set_terminated(first, "KILLED")
    assert run("a") == first and client.get_run(first).info.status == "RUNNING"
    assert client.get_run(first).data.tags[TAG] == "a" and run("b") != first
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_RUN_ID", "mine")
        assert run("a") == "mine"
    client.delete_experiment(client.get_experiment_by_name("test").experiment_id)
    with pytest.raises(ValueError, match="the experiment 'test' of sqlite.* is deleted; .*--experiment-id 1`"):
        run("a")


def test_a_server_that_refuses_is_named(tmp_path):
    with pytest.raises(ValueError, match="loggers: MLflow at .*nothing.*") as error:
        mlflow_run("a", uri=f"nothing://{tmp_path}", experiment="test", run_name="short", artifacts=None)
    assert "\n" not in str(error.value)


def test_a_password_is_not_in_the_line_of_a_server_that_does_not_answer(monkeypatch):
    """MLflow's own errors have the whole address."""
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracking, "PATIENCE", 0.0)
    uri = "http://me:secret@127.0.0.1:9"  # nothing listens there
    with pytest.raises(ValueError, match="loggers: MLflow at http://127.0.0.1:9: API request to http://127") as error:
        mlflow_run("a", uri=uri, experiment="test", run_name="short", artifacts=None)
    assert "secret" not in str(error.value)


def test_a_server_that_does_not_answer_is_asked_again_for_a_while(monkeypatch):
    """One that refuses is not, nor is a database."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setattr(tracking, "SILENT", 0.0)
    asked = []

    def ask(error, times, uri="http://tracker"):
        def answer(*arguments):
            asked.append(uri)
            if len(asked) <= times:
                raise error
            return "its id"

        asked.clear()
        monkeypatch.setattr(tracking, "_found_or_new", answer)
        return mlflow_run("a", uri=uri, experiment="test", run_name="short", artifacts=None)

    silent = MlflowException("no route to it")
    assert ask(silent, 3) == "its id" and len(asked) == 4
    monkeypatch.setattr(tracking, "PATIENCE", 0.05)
    for error, times, uri in (
        (silent, 10**9, "http://tracker"),
        (silent, 1, "sqlite:///here"),
        (MlflowException("a wrong name", INVALID_PARAMETER_VALUE), 1, "http://tracker"),
    ):
        with pytest.raises(ValueError, match=f"loggers: MLflow at {uri}: (no route to it|a wrong name)$"):
            ask(error, times, uri)
        assert len(asked) > 1 if times > 1 else len(asked) == 1


def test_many_parameters_of_any_name_are_written(tmp_path):
    client = client_of(tmp_path)
    run = mlflow_run("a", uri=client.tracking_uri, experiment="test", run_name="short", artifacts=None)
    settings = {"nested": {str(number): number for number in range(2 * AT_ONCE + 1)}, "a@b": None, "long": 10_000 * "x"}
    for _ in range(2):
        log_parameters(client, run, settings)
    data = client.get_run(run).data
    assert {name: data.params[f"nested.{name}"] for name in settings["nested"]} == {
        name: str(number) for name, number in settings["nested"].items()
    }
    assert data.params["a_b"] == "None" and "nested.1" not in data.tags
    for value in (5, 1):  # the second is the first one again
        log_parameters(client, run, {"nested": {"1": value}})
        data = client.get_run(run).data
        assert (data.params["nested.1"], data.tags["nested.1"]) == ("1", str(value))


def test_nested_settings_are_joined_with_dots():
    assert list(flat({"a": {"b": 1, "c": {"d": [2]}}, "e": {}})) == [("a.b", 1), ("a.c.d", [2]), ("e", {})]
