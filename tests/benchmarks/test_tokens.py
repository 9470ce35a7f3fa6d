import json

import torch

from benchmarks import tokens
from benchmarks.common import reporting


def test_times_both_readers(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "GRID", 4)
    monkeypatch.setattr(tokens, "ENTRIES", 400)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    rows = tokens.main(["--samples", "40", "--batch", "8", "--rounds", "1", "--seconds", "0"])
    assert [row["workers"] for row in rows] == ["in process"] * 4 + [1] * 4
    plain, dropped = (row["text tokens per sample"] for row in rows[0:4:2])
    assert dropped > plain == rows[1]["text tokens per sample"]  # without dropout both read the same tokens
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json"))
    assert record["rows"] == rows


def test_a_rate_is_over_the_cpu_time_of_both_processes():
    """Three samples with four tokens in all, for which the trainer takes 1 s and the worker 5 s."""
    own, worker = iter([1.0, 2.0]), iter([0.0, 5.0])
    text = torch.tensor([[7, 7, -1], [7, -1, -1], [7, -1, -1]])
    found = tokens.measure([{"text": text, "image": text}], [lambda: next(own), lambda: next(worker)], 0.0)
    assert found == {"per_core": 0.5, "tokens": 4 / 3}
