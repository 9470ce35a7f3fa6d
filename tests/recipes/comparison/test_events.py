"""Figures as they were logged: TensorBoard's files against what was written into them."""

import tracemalloc

import numpy as np
import pytest

from recipes.comparison.events import read_curves
from tests.recipes.comparison.made import log


def rows(first, last, start, value=1.0, every=10.0):
    return [(start + every * (batch - first), batch, {"a": value * batch}) for batch in range(first, last + 1)]


def test_a_curve_is_what_was_logged(tmp_path):
    log(tmp_path, [(100.0, 1, {"a": 0.5, "b": 2.0, "hparams/a": 9.0}), (460.0, 3, {"a": float("nan")})])
    curves = read_curves(tmp_path)
    assert set(curves) == {"a", "b"}
    assert curves["a"].batches.tolist() == [1, 3] and curves["b"].values.tolist() == [2]
    assert curves["a"].hours.tolist() == pytest.approx([0, 0.1])
    assert curves["a"].values[0] == 0.5 and np.isnan(curves["a"].values[1])


def test_a_resumed_run_is_one_curve(tmp_path, monkeypatch):
    """The first process is killed after batch 6, and the second goes on from the checkpoint of batch 4."""
    log(tmp_path, rows(1, 3, 1000.0))
    log(tmp_path, rows(4, 6, 1030.0))  # Composer begins a new file at each flush; this is the same process
    monkeypatch.setattr("os.getpid", lambda: 1)
    log(tmp_path, rows(5, 8, 90000.0, value=-1.0))
    curve = read_curves(tmp_path)["a"]
    assert curve.batches.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert curve.values.tolist() == [1, 2, 3, 4, -5, -6, -7, -8]
    seconds = [0, 10, 20, 30, *(50 + 10 * i for i in range(4))]  # of both processes, without the pause between them
    assert (3600 * curve.hours).tolist() == pytest.approx(seconds)


def test_a_start_takes_back_what_it_has_not_come_to_again(tmp_path, monkeypatch):
    """The first process validates after batches 4 and 8 and is killed; the second goes on from the checkpoint of batch
    4 and is killed before it validates; the third begins anew."""

    def trained(first, last, start):
        return [(start + batch, batch, {"loss": 1.0, "time/sample": 8.0 * batch}) for batch in range(first, last)]

    validated = [(1004.0, 4, {"val": 0.5}), (1008.0, 8, {"val": 0.4})]
    log(tmp_path, [*trained(0, 4, 1000.0), validated[0], *trained(4, 8, 1000.0), validated[1], *trained(8, 9, 1000.0)])
    monkeypatch.setattr("os.getpid", lambda: 1)
    log(tmp_path, trained(4, 6, 2000.0))
    curves = read_curves(tmp_path)
    assert curves["loss"].batches.tolist() == [0, 1, 2, 3, 4, 5] and curves["val"].batches.tolist() == [4]
    monkeypatch.setattr("os.getpid", lambda: 2)
    log(tmp_path, trained(0, 2, 3000.0))
    curves = read_curves(tmp_path)
    assert curves["loss"].batches.tolist() == [0, 1] and "val" not in curves


def test_a_clock_that_goes_back_costs_no_figures(tmp_path, monkeypatch):
    """It is set back by 25 s after batch 5; the next start is on a machine whose clock is 10 minutes behind."""
    log(tmp_path, [*rows(1, 5, 1000.0), *rows(6, 7, 1025.0)])
    monkeypatch.setattr("os.getpid", lambda: 1)
    log(tmp_path, rows(8, 9, 450.0))
    curve = read_curves(tmp_path)["a"]
    assert curve.batches.tolist() == curve.values.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (3600 * curve.hours).tolist() == pytest.approx([0, 10, 20, 30, 40, 25, 35, 40, 50])


def test_reading_takes_little_more_memory_than_the_curves(tmp_path):
    """A run of weeks logs a hundred million values."""
    log(tmp_path, [(float(batch), batch, {f"figure{i}": 1.0 for i in range(50)}) for batch in range(500)])
    tracemalloc.start()
    try:
        assert len(read_curves(tmp_path)) == 50
        assert tracemalloc.get_traced_memory()[1] < 25_000 * 50  # bytes, of values with a time and a batch
    finally:
        tracemalloc.stop()


def test_a_file_without_its_end_is_read_as_far_as_it_goes(tmp_path):
    log(tmp_path, rows(1, 5, 0.0))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for cut in (3, 20, 60):
        file.write_bytes(whole[:-cut])
        assert read_curves(tmp_path)["a"].values.tolist() == [1, 2, 3, 4, 5][: 4 if cut < 50 else 3]
    file.write_bytes(whole + b"\xff" * 100)
    assert len(read_curves(tmp_path)["a"].values) == 5
    file.write_bytes(b"")
    assert read_curves(tmp_path) == {} == read_curves(tmp_path / "none")


def test_damaged_records_are_left_out_and_told(tmp_path, capsys):
    """A changed bit of a loss would be drawn, and one of a length would end the curve."""
    log(tmp_path, rows(1, 5, 0.0))
    (file,) = tmp_path.iterdir()
    whole = bytearray(file.read_bytes())
    assert len(read_curves(tmp_path)["a"].values) == 5 and not capsys.readouterr().out
    at, bytes_of_a_record = 0, []
    while at < len(whole):
        end = at + 12 + int.from_bytes(whole[at : at + 8], "little") + 4
        bytes_of_a_record.append(range(at, end))
        at = end
    for place in bytes_of_a_record[3]:  # behind the version of the format: batch 3
        changed = bytearray(whole)
        changed[place] ^= 16
        file.write_bytes(changed)
        in_head = place < bytes_of_a_record[3].start + 12
        assert read_curves(tmp_path)["a"].values.tolist() == ([1, 2] if in_head else [1, 2, 4, 5])
        told = "damaged at byte" if in_head else "1 damaged records, whose figures are left out"
        (line,) = capsys.readouterr().out.splitlines()
        assert str(file) in line and told in line and line.endswith("copy the file again")
