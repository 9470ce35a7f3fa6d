"""Kills of training runs at random; here the runs are small programs, which go on from a number in a file."""

import json
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks import killing_training
from benchmarks.killing_training import flat, hashed, killed_runs
from data.files import write_text


def good(arguments, out):
    """Counts to 20, from where it was."""
    folder = out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    latest = folder / "latest"
    for number in range(int(latest.read_text()) if latest.exists() else 0, 20):
        time.sleep(0.005)
        write_text(latest, str(number + 1))


def forgetful(arguments, out):
    """Says in the end where it went on."""
    latest = out / "checkpoints" / "latest"
    begun = latest.exists()
    good(arguments, out)
    if begun:
        write_text(latest, "other")


@pytest.mark.parametrize(("train", "different"), [(good, set()), (forgetful, {"number"})])
def test_kills_and_what_is_different_after_them(tmp_path, monkeypatch, train, different):
    monkeypatch.setattr(killing_training, "train", train)
    monkeypatch.setattr(
        killing_training, "digests", lambda out: {"number": (out / "checkpoints" / "latest").read_text()}
    )
    report = killed_runs([], tmp_path, world=1, kills=2, rng=np.random.default_rng(3))
    assert report["kills"] == 2 and report["starts"] == 2 + report["runs"] and report["runs"] >= 1
    assert set(report["different"]) == different


def test_a_run_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(killing_training, "train", lambda arguments, out: sys.exit(1))
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        killed_runs([], tmp_path, world=1, kills=1, rng=np.random.default_rng(0))


def test_a_hash_of_each_bit():
    values = {"weights": {"a": torch.zeros(2)}, "counts": [1, {"b": 2.0}]}
    assert [name for name, _ in flat(values)] == ["weights.a", "counts.0", "counts.1.b"]
    other = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), torch.tensor([0.0, -0.0]), 0.0, json.dumps(0)]
    assert len({hashed(value) for value in (torch.zeros(2), *other)}) == 6
