import json

from benchmarks import reporting, tokens


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
