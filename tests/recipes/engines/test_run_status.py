"""The status that trackers get of a run, however it has ended."""

import atexit
import functools
import importlib
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from benchmarks.killing import fork
from recipes.engines.checkpoint_files import CheckpointFiles
from recipes.engines.lightning.checkpoints import Checkpoints
from recipes.engines.loggers import RunLoggers
from recipes.engines.wandb_writer import WandBWriter
from recipes.training import stop
from recipes.training.callback import Callback


class Ends(Callback):
    """Ends a run in one way."""

    def __init__(self, how):
        self.how = how

    def step_end(self, run):
        if run.clock.batch == 1 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if run.clock.batch == 1 and self.how == "error":
            raise RuntimeError("on purpose")

    def end(self, run):
        if self.how == "error at the end":
            raise RuntimeError("on purpose")


def fail(*arguments):
    raise ValueError("on purpose")


class Tracker(WandBWriter):
    """Writes the status into a file."""

    def __init__(self, path):
        self.path = path

    def figures(self, *arguments):
        """Nothing."""

    settings = images = figures

    def close(self, status):
        with self.path.open("a") as file:
            file.write(f"{status}\n")


def train(recipe, how, tracker):
    """Train until the run ends, and do what Python does at the end of a process, where Composer closes loggers."""
    atexit._clear()  # of the process that this one was forked from
    trainers = importlib.import_module(f"recipes.engines.{recipe.training.engine}.trainer")
    ends = Ends(how)

    def change(parts):
        parts.loggers.append(lambda: tracker)
        parts.callbacks["ends"] = ends

    trainers.build_trainer = functools.partial(trainers.build_trainer, change=change)
    if how == "last copy fails":
        CheckpointFiles.finish = fail
    if how == "does not begin":
        Checkpoints.__init__ = fail
    try:
        with stop.stop_signals():
            trainers.train(recipe)
    finally:
        atexit._run_exitfuncs()


ENDS = {
    "end": ("FINISHED", 0),
    "again": ("FINISHED", 0),
    "signal": ("KILLED", stop.EXIT_CODE),
    "error": ("FAILED", 1),
    "error at the end": ("FAILED", 1),
    "last copy fails": ("FAILED", 1),
    "does not begin": ("FAILED", 1),
}


@pytest.mark.parametrize(
    ("engine", "how"),
    # Before Composer's trainer is there, no loggers are open.
    [("composer", how) for how in ENDS if how != "does not begin"] + [("lightning", how) for how in ENDS],
)
def test_the_status_of_a_run(engine, how, quick_recipe, tmp_path):
    """A run whose last checkpoint could not be copied is not finished: the next start copies it."""
    recipe = quick_recipe(
        tmp_path, f"training.engine={engine}", "training.duration=3ba", "checkpoints={every: 1ba, autoresume: true}"
    )
    status, code = ENDS[how]
    for number, start in enumerate(("end", how) if how == "again" else (how,)):
        tracker = Tracker(tmp_path / f"status-{number}.txt")
        child = fork(lambda start=start, tracker=tracker: train(recipe, start, tracker), tmp_path / "log.txt", {})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, (tmp_path / "log.txt").read_text()
    assert tracker.path.read_text() == f"{status}\n"


def test_loggers_that_are_open_are_closed_where_another_one_cannot_be_opened(tmp_path):
    tracker = Tracker(tmp_path / "status.txt")
    with pytest.raises(ValueError, match="on purpose"):
        RunLoggers([lambda: tracker, fail])
    assert tracker.path.read_text() == "FAILED\n"


@pytest.mark.parametrize(("status", "code"), [("FINISHED", 0), ("KILLED", 1), ("FAILED", 1)])
def test_wandb_shows_a_run_that_is_not_finished_as_failed(status, code, monkeypatch):
    codes = []
    run = SimpleNamespace(finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=None, init=lambda: run))
    WandBWriter({}).close(status)
    assert codes == [code]
