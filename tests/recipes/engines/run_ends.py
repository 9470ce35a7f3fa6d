"""Run by test_run_status.py: runs that end in many ways, and the status that a tracker gets of each.

argv: FOLDER RECIPE ENGINE...

FOLDER/report.json says of each: [exit code or minus the signal, statuses, what it printed].

Each run is a process that is forked from this one, which never trains: OpenMP would wait for threads that are not in
the child.
"""

import atexit
import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import composer  # noqa: F401 - before the fork
import lightning.pytorch  # noqa: F401

from benchmarks.killing import fork
from recipes.config.recipe import Recipe, load_config
from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.lightning.checkpoints import Checkpoints
from recipes.engines.logs.wandb_writer import WandBWriter
from recipes.training import stop
from recipes.training.callback import Callback

LOGGER_FAILS = "a logger fails at the end"
WAYS = ("end", "again", "signal", "error", "error at the end", "last copy fails", LOGGER_FAILS, "does not begin")


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

    def __init__(self, path, fails=False):
        self.path, self.fails = path, fails

    def figures(self, *arguments):
        """Nothing."""

    settings = images = figures

    def close(self, status):
        with self.path.open("a") as file:
            file.write(f"{status}\n")
        if self.fails:
            raise RuntimeError("on purpose")


def train(recipe, how, statuses):
    """Train until the run ends, and do what Python does at the end of a process, where Composer closes loggers."""
    atexit._clear()  # of the process that this one was forked from
    trainers = importlib.import_module(f"recipes.engines.{recipe.training.engine}.trainer")
    ends = Ends(how)

    def change(parts):
        parts.loggers.append(lambda: Tracker(statuses, fails=how == LOGGER_FAILS))
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


def ended(folder, recipe, how):
    """The report of a run; where it is started again, of its second start."""
    for start in ("end", how) if how == "again" else (how,):
        statuses, log = folder / "statuses.txt", folder / "log.txt"
        for path in (statuses, log):
            path.unlink(missing_ok=True)
        child = fork(functools.partial(train, recipe, start, statuses), log, {})
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, statuses.read_text().split() if statuses.exists() else [], log.read_text()


if __name__ == "__main__":
    folder, path, *engines = sys.argv[1:]
    report = {}
    for engine in engines:
        for how in WAYS:
            output = f"output={folder}/{engine}-{how}"
            recipe = load_config(path, [f"training.engine={engine}", output], Recipe)
            report[f"{engine} {how}"] = ended(Path(folder), recipe, how)
    Path(folder, "report.json").write_text(json.dumps(report, indent=1))
