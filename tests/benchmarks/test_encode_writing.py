import itertools
import json
from types import SimpleNamespace

from benchmarks import encode_writing
from benchmarks.common import reporting


def test_measures_each_part(tmp_path, monkeypatch):
    for name, value in {"RESOLUTION": 8, "LATENT": (2, 4, 4), "TEXT": (3, 8), "BATCHES": 3, "BATCH": 4}.items():
        monkeypatch.setattr(encode_writing, name, value)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    clock = SimpleNamespace(process_time=itertools.count().__next__)  # every part takes a second
    monkeypatch.setattr(encode_writing, "time", clock)
    encode_writing.main(["--rounds", "1"])
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [row["part"].split()[0].strip(",") for row in record["rows"]] == ["receiving", *["writing"] * 4]
    assert all(row["images/s per core"] == 3 * 4 for row in record["rows"])
    assert record["notes"].startswith("3 batches of 4 images; ") and " both for 6 images/s" in record["notes"]
