"""Loggers by name: the metrics and images of a short run under Composer arrive where they should."""

import inspect
import sqlite3
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer import Callback, Trainer
from torch.utils.data import DataLoader

from recipes.config.build import build
from recipes.config.components import COMPONENTS
from recipes.config.schema import Component
from recipes.engines.composer.loggers import Destination
from recipes.engines.composer.model import ComposerTask
from recipes.engines.logs import loggers
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.logs.tensorboard_files import TensorBoardWriter
from recipes.engines.logs.wandb_writer import WandBWriter
from recipes.models.task import Task


class Line(Task):
    eval_names = ["loss"]

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return {"total": ((self.weight - batch["x"]) ** 2).mean()}

    def evaluate(self, batch):
        return {"loss": (self.weight - batch["x"]) ** 2}


class Images(Callback):
    def fit_end(self, state, logger):
        logger.log_images(np.zeros((2, 8, 8, 3), np.uint8), name="samples", channels_last=True, step=2, use_table=False)


def component(name, **arguments):
    return Component("logger", name, arguments, COMPONENTS["logger"][name], f"loggers.{name}")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run that logs to all of them."""
    folder = tmp_path_factory.mktemp("run")
    module_of = inspect.getmodule

    def quick_module_of(thing, filename=None):
        """For pydantic, which asks for those of all stack frames: wandb is imported in 2 s of CPU time, not in 26."""
        frame = inspect.isframe(thing)
        return sys.modules.get(thing.f_globals.get("__name__")) if frame else module_of(thing, filename)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getmodule", quick_module_of)
        patch.setattr(sys, "exit", sys.exit)  # which wandb replaces; streaming, in another test, then cannot pickle it
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        loggers = [
            component("tensorboard", flush_every=1),
            component("wandb", project="test", offline=True),
            component("mlflow", experiment="test"),
        ]
        context = {"run_name": "short", "output": str(folder), "tracked": lambda: "abc"}
        built = RunLoggers([build(logger, **context) for logger in loggers])
        data = DataLoader([{"x": torch.tensor(float(i))} for i in range(4)], batch_size=2)
        task = Line()
        trainer = Trainer(
            model=ComposerTask(task),
            train_dataloader=data,
            eval_dataloader=data,
            max_duration="2ba",
            optimizers=torch.optim.SGD(task.parameters(), lr=0.1),
            loggers=[Destination(built)],
            callbacks=[Images()],
            run_name="short",
            progress_bar=False,
        )
        for rate in (0.1, 0.2):  # as where a run goes on with other settings
            trainer.logger.log_hyperparameters({"recipe": {"optimizer": {"lr": rate}}})
        trainer.fit()
        trainer.close()
    return folder


def test_tensorboard_has_metrics_and_images(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (output / "tensorboard").rglob("events*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert "loss/train/total" in events.Tags()["scalars"]
    assert any("samples" in tag for tag in events.Tags()["images"])
    assert any("composer_version" in tag for tag in events.Tags()["tensors"])  # the settings
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("recipe"))
    assert b"    optimizer:\n      lr: 0.2\n" in events.Tensors(tag)[-1].tensor_proto.string_val[0]


def test_wandb_writes_below_the_output(output):
    (run,) = (output / "wandb").glob("offline-run-*")
    assert next(run.glob("*.wandb")).stat().st_size > 0
    assert list(run.rglob("*.png"))


def test_wandb_keeps_the_first_figures_of_a_batch(monkeypatch):
    """It would warn of each that comes again after a kill."""
    logged = []
    run = SimpleNamespace(step=5, log=lambda values, step: logged.append((step, *values)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda: run, Image=list))
    writer = WandBWriter({})
    for step in (4, 5):
        writer.figures({"loss": torch.zeros(())}, step)
        writer.images("samples", np.zeros((1, 8, 8, 3), np.uint8), step)
    assert logged == [(5, "loss"), (5, "samples")]


def test_mlflow_writes_a_database_below_the_output(output):
    with sqlite3.connect(output / "mlflow.db") as database:
        keys = {row[0] for row in database.execute("select key from metrics")}
    assert "loss/train/total" in keys


class Prints:
    """A logger of one's own."""

    def __init__(self):
        self.status = None

    def figures(self, figures, step):
        pass

    images = settings = figures

    def close(self, status):
        self.status = status


def test_a_logger_of_ones_own_has_all_methods_and_is_on_the_first_rank_alone(monkeypatch):
    """A missing method was an AttributeError at the first image, and what all ranks write is written several times."""
    writer = Prints()
    RunLoggers([lambda: writer, lambda: None]).close("FINISHED")
    assert writer.status == "FINISHED"
    monkeypatch.delattr(Prints, "images")
    with pytest.raises(ValueError, match=r"^loggers: Prints \(.*\) has no method images; define what Tens"):
        RunLoggers([lambda: writer])
    assert writer.status == "FAILED"
    monkeypatch.undo()
    monkeypatch.setattr(loggers, "is_first_rank", lambda: False)
    with pytest.raises(ValueError, match=r"^loggers: Prints \(.*\) is opened on rank 0, too; return None there"):
        RunLoggers([lambda: writer])


def test_settings_without_a_form_in_yaml_are_written_as_python_shows_them(tmp_path):
    writer = TensorBoardWriter(tmp_path, 1)
    writer.settings({"mine": {"folder": tmp_path}})
    writer.close("FINISHED")
    (file,) = tmp_path.iterdir()
    assert str(tmp_path).encode() in file.read_bytes()
