import json

from benchmarks import encoded_shards
from benchmarks.common import reporting


def test_measures_each_part_beside_another_checkout(tmp_path, monkeypatch):
    """Only the listing of tars runs in processes of its own here: others import PyTorch."""
    measured, calls = encoded_shards.measured, []

    def here(root, part, folder, pause=0.0, workers=0):
        calls.append((root == encoded_shards.ROOT, part, workers))
        if part == "tars":
            return measured(root, part, folder, pause, workers)
        if part == "readers":
            encoded_shards.prepare_readers(folder)
        return {"seconds": 2.0, "cpu": 1.0, "memory": 3.0, "result": encoded_shards.PARTS[part](folder, workers)}

    monkeypatch.setattr(encoded_shards, "measured", here)
    monkeypatch.setattr(encoded_shards, "SAMPLES", 3)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    (tmp_path / "other").symlink_to(encoded_shards.ROOT)
    monkeypatch.setattr(encoded_shards, "_streaming_readers", [])
    arguments = [
        "--shards",
        "3",
        "--files",
        "2",
        "--large",
        "2",
        "--index",
        "20",
        "--rounds",
        "1",
        "--workers",
        "1",
        "2",
    ]
    encoded_shards.main([*arguments, "--against", str(tmp_path / "other")])
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json"))
    parts = ["merge", "which shards are done", "listing of the tars"]
    network = [part + end for part in parts for end in ("", ", 0.5 ms per look-up")]
    names = [
        *network[:4],
        "readers of all files",
        "opening an index of 20 files",
        *network[4:],
        "verify, 1 processes",
        "verify, 2 processes",
    ]
    assert [row["part"] for row in record["rows"]] == names
    assert all(row["same result"] == "yes" for row in record["rows"])
    assert record["rows"][0]["time"] == record["rows"][0]["CPU time"] == "1 / 1.0" and record["rows"][0]["MB"] == "3"
