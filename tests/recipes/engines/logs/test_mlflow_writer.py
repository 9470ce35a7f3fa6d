"""Writing to MLflow: training goes on whatever the server does, and what it has not taken is sent again."""

import importlib

import numpy as np
import pytest

from recipes.engines.logs import mlflow_writer
from recipes.engines.logs.mlflow_writer import AT_ONCE, MLflowWriter


@pytest.fixture
def lines(capsys):
    """A function that gives all that was logged."""
    said = []

    def read():
        said.append(capsys.readouterr().out)
        return "".join(said)

    return read


class Server:
    """A client whose calls fail with the errors that are given, one per call, and then succeed."""

    def __init__(self, *errors):
        self.errors, self.calls, self.content = list(errors), [], []

    def _call(self, name, *content):
        self.calls.append(name)
        if self.errors:
            raise self.errors.pop(0)
        self.content.extend(content)

    def log_batch(self, run_id, metrics):
        self._call(f"batch of {len(metrics)}", *((metric.key, metric.value, metric.step) for metric in metrics))

    def log_image(self, run_id, image, key, step):
        self._call("image", (key, int(image[0, 0, 0]), step))

    def set_terminated(self, run_id, status):
        self._call(status, status)


def error(text, code="INTERNAL_ERROR"):
    """An error of MLflow, whose import would take half a second in every process that collects tests."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2

    return MlflowException(text, error_code=getattr(databricks_pb2, code))


def down():
    return error("API request failed with exception connection refused")


def refused():
    return error("no such run", "RESOURCE_DOES_NOT_EXIST")


@pytest.fixture
def quick(monkeypatch):
    """Pauses that tests can wait for."""
    for name in ("EVERY", "AGAIN", "AT_END", "SAID"):
        monkeypatch.setattr(mlflow_writer, name, 0.01)
    monkeypatch.setattr(mlflow_writer, "LAST", 1.0)


def writer_of(server):
    return MLflowWriter("http://mlflow", "run", server)


def written(server, status="FINISHED"):
    """What arrives of two batches and two images."""
    writer = writer_of(server)
    for step in (1, 2):
        writer.figures({"loss": step / 2, "rate": 0.1}, step)
    writer.images("samples", np.full((2, 8, 8, 3), 7, np.uint8), 2)
    writer.close(status)
    return server.content


ALL = [
    ("loss", 0.5, 1), ("rate", 0.1, 1), ("loss", 1.0, 2), ("rate", 0.1, 2), ("samples_0", 7, 2), ("samples_1", 7, 2),
    "FINISHED",
]  # fmt: skip


@pytest.mark.parametrize("errors", [[], [down], [down, lambda: ConnectionError("reset"), lambda: OSError("locked")]])
def test_all_arrives_once_and_in_order(errors, quick):
    assert written(Server(*(make() for make in errors))) == ALL


def test_a_server_that_fails_is_named_and_its_return_too(quick, lines):
    written(Server(down(), error("busy", "REQUEST_LIMIT_EXCEEDED")))
    assert "MLflow at http://mlflow takes nothing (MlflowException API request failed" in lines()
    assert "takes what is logged again" in lines()


def test_a_password_is_in_no_line(quick, lines):
    written(Server(error("API request to http://me:secret@mlflow/api/2.0 failed")))
    assert "API request to http://mlflow/api/2.0 failed" in lines() and "secret" not in lines()


def test_what_a_server_refuses_is_left_out_and_named(quick, lines):
    server = Server(refused())
    written(server)
    assert server.calls.count("FINISHED") == 1 and server.content[-1] == "FINISHED"
    assert "refuses what is logged (MlflowException" in lines() and "has not got" in lines()
    assert len(server.content) < len(ALL)


def test_the_end_of_a_run_does_not_wait_for_ever(quick, lines):
    """Six figures and images are missing, and the line says so."""
    server = Server(*(down() for _ in range(1000)))
    assert written(server) == []
    assert "has not got 6 figures and images of this run" in lines()


class WithoutImages(Server):
    """A client that cannot write where the server wants images, a number of times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def log_image(self, *arguments, **keys):
        if self.times:
            self.times -= 1
            raise PermissionError(13, "Permission denied", "/srv/mlflow")
        super().log_image(*arguments, **keys)


@pytest.mark.parametrize("times", [3, 100_000])
def test_figures_do_not_wait_for_images(times, quick, lines):
    server = WithoutImages(times)
    writer = writer_of(server)
    writer.images("samples", np.full((2, 8, 8, 3), 7, np.uint8), 1)
    writer.figures({"loss": 0.5}, 1)
    writer.close("FINISHED")
    assert server.content[:2] == [("loss", 0.5, 1), "FINISHED"]
    images = [] if times > 3 else [("samples_0", 7, 1), ("samples_1", 7, 1)]
    assert sorted(server.content[2:]) == images
    assert "does not take an image ([Errno 13] Permission denied" in lines()
    assert ("has not got 2" in lines()) == (not images)


@pytest.mark.parametrize("status", ["KILLED", "FAILED"])
def test_a_run_that_stops_early_waits_less(status, quick, monkeypatch, lines):
    """Whoever stopped it kills it soon, and its status, which says that it is to be started again, would be lost."""
    monkeypatch.setattr(mlflow_writer, "LAST", 3600.0)
    monkeypatch.setattr(mlflow_writer, "LAST_IF_STOPPED", 0.1)
    assert written(Server(*(down() for _ in range(100_000))), status) == []
    assert "has not got 6 figures and images of this run" in lines()


def test_figures_of_many_batches_are_one_call(monkeypatch):
    monkeypatch.setattr(mlflow_writer, "EVERY", 60.0)
    server = Server()
    writer = writer_of(server)
    for step in range(AT_ONCE + 1):
        writer.figures({"loss": 0.0}, step)
    writer.close("FINISHED")
    assert server.calls == [f"batch of {AT_ONCE}", "batch of 1", "FINISHED"]


def test_what_waits_is_bounded_and_the_oldest_is_given_up(quick, monkeypatch, lines):
    monkeypatch.setattr(mlflow_writer, "EVERY", 60.0)
    monkeypatch.setattr(mlflow_writer, "MOST", 4 * mlflow_writer.FIGURE)
    server = Server()
    writer = writer_of(server)
    for step in range(10):
        writer.figures({"loss": 0.0}, step)
    writer.close("FINISHED")
    steps = [step for _, _, step in server.content[:-1]]
    assert steps == list(range(10 - len(steps), 10)) and 0 < len(steps) < 5
    assert f"has not got {10 - len(steps)} figures" in lines()


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_server_that_is_lost_does_not_end_a_run(engine, quick_recipe, tmp_path, monkeypatch, quick, lines):
    """Nor does it change what is trained: the run ends as usual, and says what is missing."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def fail(*arguments, **options):
        raise down()

    recipe = quick_recipe(
        tmp_path / "run", f"training.engine={engine}", "training.duration=2ba",
        "loggers={mlflow: {name: mlflow, experiment: test}}",
        "callbacks.samples={name: sample_grid, prompts: [a dog], every: 2ba, steps: 1}",
    )  # fmt: skip
    trainer = importlib.import_module(f"recipes.engines.{engine}.trainer")
    with monkeypatch.context() as patch:
        for name in ("log_batch", "log_image", "set_terminated"):
            patch.setattr(f"mlflow.MlflowClient.{name}", fail)
        trainer.train(recipe)
    assert "takes nothing" in lines() and "figures and images of this run" in lines()
    assert (tmp_path / "run" / "samples" / "ba0000002.png").is_file()


def test_a_run_that_fails_is_marked_so(quick_recipe, tmp_path, monkeypatch, quick):
    """Under Lightning; Composer closes its loggers at the end of the process."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from recipes.engines.lightning.trainer import build_trainer
    from recipes.training.callback import Callback

    class Fails(Callback):
        def batch_start(self, run):
            raise RuntimeError("on purpose")

    recipe = quick_recipe(
        tmp_path, "training.engine=lightning", "training.duration=2ba",
        "loggers={mlflow: {name: mlflow, experiment: test}}",
    )  # fmt: skip
    training = build_trainer(recipe, lambda parts: parts.callbacks.update(fails=Fails()))
    with pytest.raises(RuntimeError, match="on purpose"):
        training.fit()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert run.info.status == "FAILED"
