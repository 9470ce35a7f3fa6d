"""Two starts of one run."""

import os
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from recipes import convert_checkpoint, train
from recipes.config.recipe import to_yaml
from recipes.exporting import native
from recipes.training import run_lock as module
from recipes.training.run_lock import LOCK, no_run_beside, only_run


@pytest.fixture
def other(tmp_path):
    """A run in `tmp_path` of another process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with only_run(str(tmp_path)):
            os.write(write, b"1")
            signal.pause()
    os.read(read, 1)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_start_is_refused_in_one_line_and_touches_nothing(other, quick_recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".partial.ep0-ba4.ckpt").touch()  # the other one writes it
    (tmp_path / "recipe.yaml").write_text(to_yaml(quick_recipe(tmp_path, "training.engine=lightning")))
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", str(tmp_path / "recipe.yaml")])
    with pytest.raises(SystemExit) as ended:
        train.main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and f"another run trains in {tmp_path} (process {other} on " in line
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "recipe.yaml", LOCK}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".partial.ep0-ba4.ckpt"]


def test_a_start_waits_for_the_end_of_the_one_before(other, tmp_path):
    """Whose launcher has ended before its ranks have saved a checkpoint."""
    timer = threading.Timer(0.2, os.kill, (other, signal.SIGKILL))
    timer.start()
    with only_run(str(tmp_path)):
        timer.join()


def test_only_the_first_rank_asks(other, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with only_run(str(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    said = "output: cannot write into .*/file/run .Not a directory"
    with pytest.raises(ValueError, match=said), only_run(str(tmp_path / "file" / "run")):
        pass


def test_a_checkpoint_of_a_run_that_trains_is_not_converted(other, tmp_path, capsys):
    """It would be the newest one, from which the run goes on if it is killed."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba2.ckpt").write_text("none")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "ep0-ba2.ckpt").write_text("none")
    trains = f"{tmp_path}/checkpoints: a run trains there (process {other} on "
    for folder, said in (("checkpoints", trains), ("copy", "not a checkpoint")):
        with pytest.raises(SystemExit):
            convert_checkpoint.main([str(tmp_path / folder / "ep0-ba2.ckpt"), "--to", "composer"])
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line, line


def test_a_checkpoint_of_no_run_gets_no_lock(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with no_run_beside(tmp_path / "checkpoints" / "ep0-ba2.ckpt"):
        assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_a_checkpoint_may_lie_at_the_top_of_a_file_system(monkeypatch):
    with no_run_beside(Path("/ep0-ba2.ckpt")):
        pass
    monkeypatch.setattr(native, "read_checkpoint", Mock())
    with pytest.raises(FileNotFoundError, match="/config.yaml: no such file; give the config"):
        native.from_checkpoint(Path("/ep0-ba2.ckpt"), Path("/out"), None, None, None)
