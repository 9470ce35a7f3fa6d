"""The status that trackers get of a run, however it has ended."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.config.recipe import to_yaml
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.logs.wandb_writer import WandBWriter
from recipes.training import stop
from tests.ranks import launch
from tests.recipes.engines.run_ends import Tracker, fail

ENDS = {
    "end": ("FINISHED", 0),
    "again": ("FINISHED", 0),
    "signal": ("KILLED", stop.EXIT_CODE),
    "error": ("FAILED", 1),
    "error at the end": ("FAILED", 1),
    "last copy fails": ("FAILED", 1),
    "a logger fails at the end": ("FINISHED", 1),  # which has a status already, where it can still be written
    "does not begin": ("FAILED", 1),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, quick_recipe):
    folder = tmp_path_factory.mktemp("ended")
    recipe = quick_recipe(folder, "training.duration=3ba", "checkpoints={every: 1ba, autoresume: true}")
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    script = Path(__file__).with_name("run_ends.py")
    done = launch(1, script, folder, folder / "recipe.yaml", "composer", "lightning", cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("engine", "how"),
    # Before Composer's trainer is there, no loggers are open.
    [("composer", how) for how in ENDS if how != "does not begin"] + [("lightning", how) for how in ENDS],
)
def test_the_status_of_a_run(engine, how, ended):
    """A run whose last checkpoint could not be copied is not finished: the next start copies it."""
    status, code = ENDS[how]
    exit_code, statuses, text = ended[f"{engine} {how}"]
    assert (exit_code, statuses) == (code, [status]), text


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
