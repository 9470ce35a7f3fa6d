"""Locks of folders against other processes."""

import os
import signal

import pytest

from data.system.locks import held, in_turn


def in_a_child(act):
    """The exit code of a forked process that runs a function."""
    child = os.fork()
    if not child:
        try:
            act()
        except ValueError as error:
            os._exit(7 if "process" in str(error) and str(os.getppid()) in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_another_process_is_refused_and_named(tmp_path):
    path = tmp_path / "folder" / ".lock"

    def take():
        with held(path, "folder: {holder} writes to it"):
            pass

    with held(path, ""):
        assert in_a_child(take) == 7
    assert in_a_child(take) == 0


def test_a_turn_ends_also_where_a_process_was_forked_in_it(tmp_path):
    path = tmp_path / ".lock"

    def take(place):
        signal.alarm(20)
        with in_turn(path, place):
            pass

    with in_turn(path, 3):
        child = os.fork()
        if not child:
            signal.pause()
        assert in_a_child(lambda: take(4)) == 0  # of another shard
    try:
        assert in_a_child(lambda: take(3)) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_may_wait_for_another_and_says_so(tmp_path, monkeypatch, capsys):
    """The other one gives it free while this one waits, or does not."""
    path, (read, write) = tmp_path / ".lock", os.pipe()
    child = os.fork()
    if not child:
        with held(path, ""):
            os.write(write, b"1")
            signal.pause()
    os.read(read, 1)
    text, busy = "folder: {holder} writes to it", f"folder: process {child} on {os.uname().nodename} writes to it"
    pauses = []

    def end_of_the_other(seconds):
        pauses.append(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    try:
        with pytest.raises(ValueError, match=busy), held(path, text, patience=0.01):
            pass
        monkeypatch.setattr("time.sleep", end_of_the_other)
        with held(path, text, patience=60.0):
            assert len(pauses) == 1
    finally:
        if not pauses:
            end_of_the_other(0)
    assert f"{busy}; this one waits up to 60 s" in capsys.readouterr().out


def test_a_killed_process_holds_nothing(tmp_path):
    path = tmp_path / ".lock"

    def die():
        with held(path, ""):
            os.kill(os.getpid(), 9)

    assert in_a_child(die) == -9
    with held(path, ""):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with held(tmp_path / ".lock", ""):
        pass
    assert "this file system has no locks (Function not implemented)" in capsys.readouterr().out


def test_other_errors_are_not_taken_for_a_busy_lock(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with pytest.raises(OSError, match="Input/output error"), held(tmp_path / ".lock", ""):
        pass
