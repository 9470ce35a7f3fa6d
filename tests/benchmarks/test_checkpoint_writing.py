import json

import pytest

from benchmarks import checkpoint_writing
from benchmarks.common import reporting


def test_both_ways_write_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(checkpoint_writing, "TENSOR", 10**5)
    monkeypatch.setattr("sys.argv", ["x", "--mb", "1", "--rounds", "1", "--folder", str(tmp_path)])
    checkpoint_writing.main()
    record = json.loads((tmp_path / "checkpoint_writing-1mb-cpu.json").read_text())
    assert [row["written by"] for row in record["rows"]] == ["torch.save", "checkpoints of runs"]
    assert len(list(tmp_path.iterdir())) == 2  # the table


def test_a_folder_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--folder", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        checkpoint_writing.main()
    assert "--folder: there is no folder nowhere" in capsys.readouterr().err
