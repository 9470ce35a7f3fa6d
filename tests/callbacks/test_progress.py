"""Lines that say how far a run is, how fast, and how long it will take."""

import re
from types import SimpleNamespace

import pytest
from composer import Time
from composer.core import Timestamp

from callbacks import progress
from callbacks.progress import Progress, clock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def state_at(batch, of, samples=16):
    timestamp = Timestamp(batch=batch, sample=batch * samples)
    elapsed = Time.from_timestring("1dur") * (batch / of)
    losses = {"loss/train/total": 0.5} if batch else {}
    return SimpleNamespace(timestamp=timestamp, get_elapsed_duration=lambda: elapsed, total_loss_dict=losses)


def test_lines(now, capsys):
    callback = Progress("name", "runs/name", seconds=10)
    callback.fit_start(state_at(0, 100), None)
    for batch, seconds in ((1, 1), (5, 9.9), (10, 10), (11, 15), (30, 30), (100, 31)):
        now.seconds = 1000 + seconds
        callback.batch_end(state_at(batch, 100), None)
    now.seconds = 1032
    callback.fit_end(state_at(100, 100), None)
    assert capsys.readouterr().out.splitlines() == [
        "name:  10%, batch 10, loss 0.5000, 16 samples/s, 1:30 left",
        "name:  30%, batch 30, loss 0.5000, 16 samples/s, 1:10 left",
        "name: 100%, batch 100, loss 0.5000, 1120 samples/s, 0:00 left",
        "name: 100 batches in 0:32; see runs/name",
    ]


def test_a_resumed_run_counts_from_where_it_started(now, capsys):
    callback = Progress("name", "out", seconds=10)
    callback.fit_start(state_at(50, 100), None)
    now.seconds += 10
    callback.batch_end(state_at(60, 100), None)
    assert capsys.readouterr().out == "name:  60%, batch 60, loss 0.5000, 16 samples/s, 0:40 left\n"


def test_validation_figures_are_those_of_its_set(capsys):
    class Metric:
        def __init__(self, value):
            self.value = value

        def compute(self):
            assert self.value is not None, "figures of a set that was not read yet"
            return self.value

    state = state_at(7, 10)
    state.dataloader_label = "val"
    state.eval_metrics = {"other": {"loss": Metric(None)}, "val": {"loss": Metric(0.25), "psnr": Metric(30.0)}}
    Progress("name", "out").eval_end(state, None)
    (line,) = capsys.readouterr().out.splitlines()
    assert "val" in line and "batch 7" in line and line.endswith("loss 0.2500, psnr 30.0000")


def test_other_ranks_are_silent(now, capsys, monkeypatch):
    monkeypatch.setattr(progress.dist, "get_global_rank", lambda: 1)
    callback = Progress("name", "out", seconds=0)
    callback.fit_start(state_at(0, 10), None)
    callback.batch_end(state_at(1, 10), None)
    callback.fit_end(state_at(10, 10), None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text
    assert re.fullmatch(r"(\d+:)?\d?\d:\d\d", text)
