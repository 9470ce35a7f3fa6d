"""The soak's arithmetic, and a short one."""

import itertools

import pytest

from benchmarks.soak import FILES, MIB, OVERRIDES, bytes_of, growth, main, soak


def test_growth_is_that_of_the_last_third_over_the_second():
    def notes(size):
        return [(float(second), size(second)) for second in range(90)]

    assert growth(notes(lambda second: 7)) == 0
    assert growth(notes(lambda second: min(second, 25))) == 0  # warm-up
    assert growth(notes(lambda second: 3 * second)) == pytest.approx(90, abs=4)
    assert growth(notes(lambda second: 5 + 100 * (second == 70))) == 0  # a peak is no growth
    with pytest.raises(ValueError, match="only 1 notes"):
        growth([(0.0, 5)])


def test_memory_of_a_process_that_has_ended_is_0():
    assert bytes_of(2**22 + 1) == 0


def test_a_short_soak(small_recipe, tmp_path, monkeypatch):
    """A second per batch: what is kept of each batch shows, if it is large."""
    seconds = itertools.count()
    monkeypatch.setattr("benchmarks.soak.clock", lambda: float(next(seconds)))
    own = ["callbacks.progress=null", "data.workers=1", "evals.val=null", "checkpoints.save=false", "loggers={}"]
    found = soak(small_recipe(tmp_path / "run", *OVERRIDES, *own), seconds=30.0)
    assert found.batches == 31 and found.notes.keys() == {"trainer", "workers", FILES}
    files = found.notes.pop(FILES)
    assert all(size > MIB for notes in found.notes.values() for _, size in notes)
    assert files[0][1] > 3 and growth(files) < 8
    assert growth(found.notes["trainer"]) < 64 * MIB and growth(found.notes["workers"]) < 64 * MIB


def test_help_is_no_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0 and "keys:" in capsys.readouterr().out
