import itertools
import json

from benchmarks import epochs
from benchmarks.common import reporting
from data.encoded import dataset


def test_both_ways_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(dataset, "AHEAD_FROM", dataset.AHEAD_FROM)
    words = "--samples 4000 --batches 3 --workers 1 --rounds 1"
    monkeypatch.setattr("sys.argv", ["epochs.py", *words.split()])
    epochs.main()
    record = json.loads((tmp_path / "epochs-4e3-cpu.json").read_text())
    assert [row["order made"] for row in record["rows"]] == ["when the epoch begins", "ahead"]
    assert {row["samples"] for row in record["rows"]} == {4235}  # of 11 files


def test_an_epoch_is_begun_near_its_end(tmp_path):
    assert epochs.write_set(tmp_path, 400) == 770
    loading = epochs.open_set(tmp_path, 0)
    for _, rest in itertools.islice(epochs.ends_of_epochs(loading, 4), 2):
        assert len(list(rest)) == 3
