import json

from benchmarks import encode_writing, reporting


def test_measures_each_part(tmp_path, monkeypatch):
    for name, value in {"RESOLUTION": 8, "LATENT": (2, 4, 4), "TEXT": (3, 8), "BATCHES": 3, "BATCH": 4}.items():
        monkeypatch.setattr(encode_writing, name, value)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    encode_writing.main(["--rounds", "1"])
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [row["part"].split()[0].strip(",") for row in record["rows"]] == ["receiving", *["writing"] * 4]
    assert all(row["images/s per core"] > 0 for row in record["rows"])
    assert record["notes"].startswith("3 batches of 4 images; ")
