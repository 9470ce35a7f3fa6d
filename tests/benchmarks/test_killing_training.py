"""Kills of training runs at random; here the runs are small programs, which go on from a number in a file."""

import json
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import killing_training
from benchmarks.killing_training import flat, hashed, killed_runs
from data.system.files import write_text
from recipes.training.stop import EXIT_CODE


def good(arguments, out):
    """Counts to 20, from where it was."""
    folder = out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    latest = folder / "latest"
    for number in range(int(latest.read_text()) if latest.exists() else 0, 20):
        time.sleep(0.005)
        write_text(latest, str(number + 1))


@pytest.mark.parametrize(("forgets", "different"), [(False, set()), (True, {"number"})])
def test_kills_and_what_is_different_after_them(tmp_path, monkeypatch, forgets, different):
    starts = []  # of the run that is killed; it may be killed before it has written anything

    def train(arguments, out):
        good(arguments, out)
        if forgets and len(starts) > 1:
            write_text(out / "checkpoints" / "latest", "21")

    monkeypatch.setattr(killing_training, "train", train)
    monkeypatch.setattr(killing_training, "losses_of", lambda out: starts.append(out) or [])
    monkeypatch.setattr(
        killing_training, "digests", lambda out: {"number": (out / "checkpoints" / "latest").read_text()}
    )
    report = killed_runs([], tmp_path, world=1, kills=2, rng=np.random.default_rng(3), signals=[signal.SIGKILL])
    assert report["kills"] == 2 and report["starts"] == 2 + report["runs"] and report["runs"] >= 1
    assert set(report["different"]) == different


@pytest.fixture
def no_signal_too_early():
    """Signals reach the processes that a test forks when they have set a handler, see `handle`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def handle(function):
    signal.signal(signal.SIGTERM, lambda *arguments: function())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def counts(arguments, out, behind):
    """Counts to 40 from where it was. After SIGTERM it saves the batch that is so many behind, and asks for a start."""
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    stopped = []
    handle(lambda: stopped.append(True))
    begun = max((int(path.stem.split("ba")[1]) for path in (out / "checkpoints").iterdir()), default=10)
    for batch in range(begun + 1, 41):
        time.sleep(0.01)
        with open(out / killing_training.LOSSES, "a") as lines:
            lines.write(json.dumps([batch, 0.0]) + "\n")
        if stopped:
            write_text(out / "checkpoints" / f"ep0-ba{batch - behind}.ckpt", "")
            sys.exit(EXIT_CODE)


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.usefixtures("no_signal_too_early")
def test_batches_that_are_lost_after_a_signal(tmp_path, monkeypatch, behind):
    monkeypatch.setattr(killing_training, "train", partial(counts, behind=behind))
    monkeypatch.setattr(killing_training, "digests", lambda out: {})
    moments = SimpleNamespace(uniform=lambda *bounds: 0.2, integers=lambda size: 0)
    report = killed_runs([], tmp_path, world=1, kills=1, rng=moments, signals=[signal.SIGTERM])
    assert report["kills"] == 1 and report["lost"] == behind and report["slowest"] > 0


@pytest.mark.usefixtures("no_signal_too_early")
def test_a_run_that_fails_at_a_signal_is_an_error(tmp_path, monkeypatch):
    def train(arguments, out):
        while out.name == "killed":
            handle(lambda: sys.exit(1))
            time.sleep(0.01)

    monkeypatch.setattr(killing_training, "train", train)
    monkeypatch.setattr(killing_training, "digests", lambda out: {})
    moments = SimpleNamespace(uniform=lambda *bounds: 0.1, integers=lambda size: 0)
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        killed_runs([], tmp_path, world=1, kills=1, rng=moments, signals=[signal.SIGTERM])


def test_a_run_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(killing_training, "train", lambda arguments, out: sys.exit(1))
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        killed_runs([], tmp_path, world=1, kills=1, rng=np.random.default_rng(0), signals=[signal.SIGKILL])


def test_a_hash_of_each_bit():
    values = {"weights": {"a": torch.zeros(2)}, "counts": [1, {"b": 2.0}]}
    assert [name for name, _ in flat(values)] == ["weights.a", "counts.0", "counts.1.b"]
    other = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), torch.tensor([0.0, -0.0]), 0.0, json.dumps(0)]
    assert len({hashed(value) for value in (torch.zeros(2), *other)}) == 6
