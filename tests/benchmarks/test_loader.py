import json

import pytest
import torch

from benchmarks import loader
from benchmarks.common import reporting


def test_times_every_reader_on_the_same_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loader, "LATENT", (4, 4, 4))
    monkeypatch.setattr(loader, "TEXT", (3, 8))
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    arguments = ["--samples", "24", "--batch", "5", "--rounds", "1", "--seconds", "0", "--shard-size", "4kb"]
    measured = loader.main(arguments)
    assert [row["workers"] for row in measured] == [0] * 5 + [1] * 5
    assert all(row["per_core"] > 0 and row["wall"] > 0 and row["cores"] > 0 for row in measured)
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json"))
    assert [row["reader"] for row in record["rows"]] == [row["reader"] for row in measured]
    assert "Goal: webdataset at least matched" in capsys.readouterr().out


def test_readers_that_differ_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "LATENT", (4, 4, 4))
    monkeypatch.setattr(loader, "TEXT", (3, 8))
    loader.write(tmp_path, 6, "4kb")
    next((tmp_path / "files").glob("*.text.npy")).unlink()
    with pytest.raises(ValueError, match=".npy files with 0 workers delivers other samples than this loader"):
        loader.run(tmp_path, 3, rounds=1, seconds=0)


def test_a_rate_is_over_the_cpu_time_of_both_processes(monkeypatch):
    """Two batches of 3 and 2 samples, for which the trainer takes 2 s of CPU time and the worker 8 s, in 5 s."""
    wall, own, worker = (iter(values) for values in ([10.0, 15.0], [1.0, 3.0], [4.0, 12.0]))
    monkeypatch.setattr(loader.time, "perf_counter", lambda: next(wall))
    batches = [dict.fromkeys(("mean", "std", "text", "seed"), torch.zeros(count, 1)) for count in (3, 2)]
    found = loader.measure(batches, [lambda: next(own), lambda: next(worker)], 0.0)
    assert found == {"per_core": 0.5, "wall": 1.0, "cores": 2.0}


def test_ratios_are_those_of_this_loader():
    measured = [
        {"reader": reader, "workers": workers, "per_core": rate, "per_core_range": [1, 2], "wall": 1.0, "cores": 1.0}
        for reader, workers, rate in ((loader.OURS, 0, 600), ("a", 0, 300), (loader.OURS, 1, 400), ("a", 1, 800))
    ]
    assert [row["this loader does"] for row in loader.columns(measured)] == ["1.0x", "2.0x", "1.0x", "0.5x"]


def test_goals():
    def row(reader, workers, rate):
        return {"reader": reader, "workers": workers, "per_core": rate}

    rows = [
        row(loader.OURS, 0, 9000),
        row(loader.OURS, 1, 2900),
        row("webdataset", 0, 5000),
        row("webdataset", 1, 2800),
    ]
    assert list(loader.goals(rows).values()) == [False, True]
    assert list(loader.goals([*rows, row("webdataset, not decoded", 1, 3000)]).values()) == [False, False]
