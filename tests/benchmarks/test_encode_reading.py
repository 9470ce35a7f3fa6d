import pytest
import torch

from benchmarks import encode_reading
from benchmarks.common import reporting


def test_times_every_reader_on_the_same_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    arguments = ["--sizes", "90x60", "40x300", "--resolutions", "32", "64", "--images", "20", "--rounds", "1"]
    rows = encode_reading.main(arguments)
    readers = [*encode_reading.READERS, encode_reading.DALLE]
    assert [(row["image"], row["resolution"], row["reader"]) for row in rows] == [
        (size, resolution, reader) for size in ("90x60", "40x300") for resolution in (32, 64) for reader in readers
    ]
    assert all(row["images/s"] > 0 and (row["ratio"] == 1) >= (row["reader"] == encode_reading.OURS) for row in rows)
    assert "| 40x300 |" in capsys.readouterr().out


def test_readers_that_differ_are_not_compared(tmp_path, monkeypatch):
    encode_reading.write_tar(tmp_path / "a.tar", (40, 30), 3)
    black = {"other": lambda tar, resolution: iter([torch.zeros(3, 1, resolution, resolution, 3, dtype=torch.uint8)])}
    monkeypatch.setattr(encode_reading, "READERS", black)
    with pytest.raises(ValueError, match="other delivers other images than this project"):
        encode_reading.run(tmp_path / "a.tar", 16, rounds=1)


def test_a_size_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        encode_reading.main(["--sizes", "640"])
    assert "--sizes 640: give width and height" in capsys.readouterr().err
