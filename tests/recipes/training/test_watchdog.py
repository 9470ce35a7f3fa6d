"""A run that hangs says where."""

import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import re
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.loading import leave_signals
from data.workers import stacks
from recipes.training import watchdog
from recipes.training.levers import Levers
from recipes.training.watchdog import alive, calls, innermost, watched
from tests.recipes.training.fake_run import FakeRun


def wait_for(condition):
    """A call that waits, in the end for this test itself."""
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    assert condition()


def hanging_worker(started):
    leave_signals(0)
    started.set()
    time.sleep(60)


@contextmanager
def standard_error_in(file):
    """pytest's `capfd.readouterr` loses what another thread writes between its read and its truncation."""
    former = os.dup(2)
    with file.open("ab") as opened:
        os.dup2(opened.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(former, 2)
        os.close(former)


def test_the_rank_the_batch_and_the_calls_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    context = multiprocessing.get_context("fork")
    started, printed = context.Event(), tmp_path / "err"

    def lines():
        """From the report on; where forking took too long, there was one before it."""
        found = [line for line in printed.read_text().splitlines() if line.startswith("rank 3: ")]
        return list(itertools.dropwhile(lambda line: "since before_data" not in line, found))

    file = tmp_path / "stacks" / "rank-3.txt"
    with standard_error_in(printed), watched(0.5, tmp_path):
        worker = context.Process(target=hanging_worker, args=(started,), daemon=True)
        worker.start()
        assert started.wait(60)
        run = FakeRun().at(7)
        Levers([]).call("before_data", run)
        wait_for(lambda: lines() and file.is_file() and f"data worker {worker.pid}" in file.read_text())
        Levers([]).call("batch_start", run)
        wait_for(lambda: any("goes on" in line for line in lines()))
        worker.kill()
        worker.join()
    report, again = lines()[:2]
    assert "no progress for" in report and "since before_data after batch 7" in report
    here = "tests/recipes/training/test_watchdog.py"
    assert f"waits in {here}" in report and " wait_for" in report
    assert re.search(rf"its data workers in .*{here}:\d+ hanging_worker", report)  # other tests may have left some
    assert report.endswith(f"all stacks: {file}") and again.startswith("rank 3: goes on after")
    text = file.read_text()
    assert "thread MainThread:" in text and f"data worker {worker.pid}, innermost call first:" in text


def test_it_goes_on_where_it_cannot_write(tmp_path):
    """Its thread also tells a health check that the run is well."""
    (tmp_path / "stacks").touch()  # where the folder should be
    printed = tmp_path / "err"
    with standard_error_in(printed), watched(0.2, tmp_path):
        run = FakeRun().at(7)
        for hook, line in (("batch_start", "could not be written (File exists)"), ("step_end", "goes on after")):
            alive(hook, run)
            wait_for(lambda line=line: line in printed.read_text())


def run_that_hangs(folder, seconds, ends, wait, *signs):
    """The status and the lines of a process that gives signs of life and then waits; 7 if it came back from that."""
    child = os.fork()
    if not child:
        os.dup2(os.open(folder / "err", os.O_WRONLY | os.O_CREAT), 2)
        with watched(seconds, folder, ends):
            for sign in signs:
                alive(sign, FakeRun().at(7))
            wait()
            os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, (folder / "err").read_text().splitlines()


def test_a_run_that_hangs_while_levers_change_the_model_is_reported_too():
    """Composer has no clock yet, whose error ended the watchdog."""
    without_clock = SimpleNamespace()
    for hook in ("check_machine", "change_modules", "shard"):
        assert watchdog.position(watchdog.Progress(0.0, hook, without_clock)) == f"{hook} at its start"


@pytest.mark.parametrize(
    "hook, grace, ends, status",
    [
        ("before_forward", 0.1, True, 86),
        ("before_forward", 600.0, True, 7),
        ("before_forward", 0.1, False, 7),
        ("step_end", 0.1, True, 7),
        ("start", 0.1, True, 7),
    ],
)
def test_a_run_that_hangs_in_a_batch_ends_where_it_is_asked_to(tmp_path, monkeypatch, hook, grace, ends, status):
    """When other ranks have had the time to report. After other hooks it may compile, save a checkpoint or export, so
    that it only reports for the first hour."""
    monkeypatch.setattr(watchdog, "GRACE", grace)

    def wait():
        wait_for(lambda: os.path.getsize(tmp_path / "err"))
        time.sleep(60 if status == 86 else 1)

    signs = () if hook == "start" else ("step_end", hook)
    found, (first, *more) = run_that_hangs(tmp_path, 1.0, ends, wait, *signs)
    assert found == status and "no progress" in first
    assert f"since {'its start' if hook == 'start' else hook}" in first
    assert [("ended by training.watchdog_ends" in line) for line in more] == [True] * (status == watchdog.EXIT_CODE)


def test_a_run_ends_although_its_file_system_does_not_answer(tmp_path, monkeypatch):
    """Which may be why it hangs: here nobody reads the pipe that is in the place of the file with the stacks. Nor what
    it says, as `tee` has ended."""
    monkeypatch.setattr(watchdog, "GRACE", 0.1)
    (tmp_path / "stacks").mkdir()

    def wait():
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 2)
        os.mkfifo(tmp_path / "stacks" / f".rank-0.txt.{os.uname().nodename}.{os.getpid()}")
        time.sleep(20)

    assert run_that_hangs(tmp_path, 1.0, True, wait, "step_end", "before_forward")[0] == watchdog.EXIT_CODE


@pytest.mark.parametrize("ends", [True, False])
def test_code_that_keeps_pythons_lock_is_reported_and_ended_by_faulthandler(tmp_path, ends):
    """No thread of Python runs. The status is that of faulthandler."""

    def wait():
        time.sleep(0.4)  # till the watchdog has begun
        ctypes.PyDLL(None).usleep(2_000_000)

    found, lines = run_that_hangs(tmp_path, 0.4, ends, wait, "step_end", "before_forward")
    assert found == (1 if ends else 7)
    begin = next(number for number, line in enumerate(lines) if line.startswith("Timeout ("))
    assert any("test_watchdog.py" in line for line in lines[begin:])


def test_signs_of_life_keep_it_silent(tmp_path, capfd):
    with watched(2.0, tmp_path):
        for _ in range(10):
            alive("step_end", None)
            time.sleep(0.01)
    with watched(None, tmp_path):
        pass
    assert "rank" not in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_a_worker_that_ends_while_it_is_asked_has_no_stacks(monkeypatch):
    """The main thread may end it at any time. An error would end the watchdog's thread."""
    stacks.keep_stacks()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()

    def ends(process):
        if process == worker.pid:
            worker.kill()
            worker.join()
        return process == worker.pid

    monkeypatch.setattr(stacks, "_catches", ends)
    assert stacks.stacks_of_workers() == {}


def test_a_first_batch_may_end_while_the_watchdog_looks(tmp_path, monkeypatch):
    """What it has seen of the start, it does not mix with what it sees of the batch: the start has no run."""
    beats, clock, looks = [], time.monotonic, iter([False, True])

    def batch_ends():
        monkeypatch.setattr(watchdog, "time", time)
        alive("step_end", FakeRun().at(1))
        return clock()

    alive("start", None)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=batch_ends))
    done = SimpleNamespace(wait=lambda seconds: next(looks))
    heartbeat = SimpleNamespace(write=lambda until, hook, on_gpu: beats.append((hook, on_gpu)))
    try:
        watchdog._watch(done, 300.0, tmp_path, False, heartbeat)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert beats == [("start", False)]


def test_calls_are_those_of_this_repository_and_the_innermost():
    root = Path(__file__).resolve().parents[3]
    frame = traceback.FrameSummary
    own = [frame(f"{root}/recipes/{name}.py", 5, "f", lookup_line=False) for name in ("a", "b", "c")]
    package = frame(f"{root}/.venv/lib/python3.11/site-packages/torch/d.py", 7, "all_reduce", lookup_line=False)
    assert calls([*own, package]) == "recipes/b.py:5 f > recipes/c.py:5 f > torch/d.py:7 all_reduce"
    assert calls([package, own[0]]) == "recipes/a.py:5 f"
    text = 'Thread 0x1 (most recent call first):\n  File "/x/y.py", line 1 in g\n\n'
    text += 'Current thread 0x2 (most recent call first):\n'
    text += '  File "/usr/lib/python3.11/selectors.py", line 415 in select\n  File "/z.py", line 2 in h\n'
    assert innermost(text) == "selectors.py:415 select" and innermost("") == "an unknown call"
