"""Processes leave their process groups without a deadlock and end without an error."""

from pathlib import Path

from tests.ranks import launch


def test_they_are_left_right_after_a_collective(tmp_path):
    """`destroy_process_group` alone hung in the first or second of the ten."""
    ended = launch(2, Path(__file__).with_name("leaving_ranks.py"), tmp_path, timeout=120)
    # The ranks write to one file at the same time, so that lines may be mixed.
    assert (ended.returncode, ended.stdout.count("left")) == (0, 2), ended.stderr[-3000:]
