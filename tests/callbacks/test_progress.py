"""Lines that say how far a run is, how fast, and how long it will take."""

import re
from types import SimpleNamespace

import pytest

from callbacks import progress
from callbacks.progress import Progress, format_seconds
from tests.recipes.training.fake_run import FakeRun


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def run_at(batch, of):
    run = FakeRun(duration=f"{of}ba").at(batch, samples=16)
    run.loss = 0.5 if batch else None
    return run


def test_lines(now, capsys):
    callback = Progress("name", "runs/name", seconds=10)
    callback.begin(run_at(0, 100))
    for batch, seconds in ((1, 1), (5, 9.9), (10, 10), (11, 15), (30, 30), (100, 31)):
        now.seconds = 1000 + seconds
        callback.step_end(run_at(batch, 100))
    now.seconds = 1032
    callback.end(run_at(100, 100))
    assert capsys.readouterr().out.splitlines() == [
        "name:  10%, batch 10, loss 0.5000, 16 samples/s, 1:30 left",
        "name:  30%, batch 30, loss 0.5000, 16 samples/s, 1:10 left",
        "name: 100%, batch 100, loss 0.5000, 1120 samples/s, 0:00 left",
        "name: 100 batches in 0:32; see runs/name",
    ]


def test_a_resumed_run_counts_from_where_it_started(now, capsys):
    callback = Progress("name", "out", seconds=10)
    callback.begin(run_at(50, 100))
    now.seconds += 10
    callback.step_end(run_at(60, 100))
    assert capsys.readouterr().out == "name:  60%, batch 60, loss 0.5000, 16 samples/s, 0:40 left\n"


def test_a_run_of_epochs(now, capsys):
    """Its share is known within an epoch, too; the time left is not said where the length of an epoch is not known."""
    for epoch_batches in (50, None):
        run, callback = FakeRun(duration="2ep", epoch_batches=epoch_batches), Progress("name", "out", seconds=10)
        callback.begin(run)
        now.seconds += 10
        run.at(10, samples=16).loss = 0.5
        callback.step_end(run)
    assert capsys.readouterr().out.splitlines() == [
        "name:  10%, batch 10, loss 0.5000, 16 samples/s, 1:30 left",
        "name:   0%, batch 10, loss 0.5000, 16 samples/s",
    ]


def test_validation_figures_are_those_of_its_set(capsys):
    run = run_at(7, 10)
    run.eval_label, run.eval_figures = "val", {"loss": 0.25, "psnr": 30.0}
    Progress("name", "out").eval_end(run)
    assert capsys.readouterr().out == "name: val at batch 7: loss 0.2500, psnr 30.0000\n"


def test_other_ranks_are_silent(now, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    callback = Progress("name", "out", seconds=0)
    callback.begin(run_at(0, 10))
    now.seconds += 1
    callback.step_end(run_at(1, 10))
    callback.end(run_at(10, 10))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_seconds_as_a_person_reads_them(seconds, text):
    assert format_seconds(seconds) == text
    assert re.fullmatch(r"(\d+:)?\d?\d:\d\d", text)
