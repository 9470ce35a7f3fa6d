"""Shared memory of dead processes is found and removed, that of living ones stays."""

import fcntl
import os
import signal
import time

import pytest

from data.encoded import stale_memory
from data.encoded.stale_memory import clear, hold, left_behind, of_others
from recipes.checking.machine import stale_memory as check


def blocks(folder, number):
    """What streaming makes for a data set."""
    found = [folder / f"{number:06}_{name}" for name in ("locals", "shard_states")]
    for path in found:
        path.write_bytes(b"1234")
    return found


@pytest.fixture
def dead(tmp_path):
    """Blocks of a process that was killed, and whose own child has ended, too."""
    child = os.fork()
    if not child:
        hold(41, tmp_path)
        blocks(tmp_path, 41)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return blocks(tmp_path, 41)


def test_blocks_of_a_killed_process_are_removed_and_others_stay(tmp_path, dead):
    hold(42, tmp_path)
    own = blocks(tmp_path, 42)
    assert left_behind(tmp_path) == sorted(dead)
    assert clear(tmp_path) == sorted(dead) and clear(tmp_path) == []
    assert all(path.exists() for path in own) and not any(path.exists() for path in dead)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000042_locals", "000042_shard_states", "precompose-42"]
    stale_memory._release(42, tmp_path / "precompose-42", os.getpid())
    assert not (tmp_path / "precompose-42").exists()


def test_a_lock_whose_file_is_removed_in_the_same_moment_is_made_again(tmp_path, monkeypatch):
    """By another process that ends with this number, or clears: this one would hold a lock that nobody sees."""
    path, flock = tmp_path / "precompose-46", fcntl.flock

    def late(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    hold(46, tmp_path)
    blocks(tmp_path, 46)
    assert path.exists() and left_behind(tmp_path) == []
    stale_memory._release(46, path, os.getpid())
    assert not path.exists()


def test_the_files_that_streaming_locks_go_with_their_run(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    locks = [temporary / f"{number:06}_{name}_filelock" for number in (44, 45) for name in ("barrier", "cache")]
    for path in locks:
        path.touch()
    hold(44, tmp_path)
    stale_memory._release(44, tmp_path / "precompose-44", os.getpid())
    assert sorted(temporary.iterdir()) == locks[2:]


def test_a_process_that_was_forked_keeps_what_its_killed_parent_used(tmp_path):
    wait, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        hold(43, tmp_path)
        blocks(tmp_path, 43)
        if not os.fork():  # a data worker
            os.read(wait, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(wait)
    os.waitpid(child, 0)
    assert left_behind(tmp_path) == []
    os.close(end)  # the worker ends
    limit = time.monotonic() + 60
    while not left_behind(tmp_path) and time.monotonic() < limit:
        time.sleep(0.01)
    assert len(clear(tmp_path)) == 2


def test_blocks_without_a_lock_are_stale_if_nobody_has_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr(stale_memory, "YOUNG", -1.0)
    free, used = blocks(tmp_path, 7)
    (tmp_path / "sem.of-another-program").touch()
    with open(used, "rb"):
        assert of_others(tmp_path) == [free]
        monkeypatch.setattr(stale_memory, "YOUNG", 60.0)
        assert of_others(tmp_path) == []
        monkeypatch.setattr(stale_memory, "YOUNG", -1.0)
        assert "1 blocks of dead processes" in check(False, tmp_path).text
        # In a container, another one may have it open.
        monkeypatch.setattr(stale_memory, "sees_all_processes", lambda: False)
        kept = check(True, tmp_path)
        assert kept.level == "warning" and "0 removed; 1 of them may be in use in other containers" in kept.text
        assert free.exists()
        monkeypatch.setattr(stale_memory, "sees_all_processes", lambda: True)
        assert check(True, tmp_path).level == "ok"
        assert not free.exists() and used.exists()


def test_the_doctor_clears(tmp_path, dead):
    assert check(False, tmp_path).level == "warning" and all(path.exists() for path in dead)
    assert check(True, tmp_path).text.endswith("all removed")
    assert check(False, tmp_path).level == "ok"
