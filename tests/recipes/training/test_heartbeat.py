"""What a process that trains says of itself, and who is still there to have said it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recipes.training import watchdog
from recipes.training.heartbeat import VARIABLE, Heartbeat, HeartbeatFile, heartbeats
from recipes.training.levers import Levers
from recipes.training.watchdog import LONG, QUICK, Progress, watched, well_until
from tests.disks import small_files
from tests.recipes.training.fake_run import FakeRun

ROOT = Path(__file__).resolve().parents[3]


def test_processes_that_live_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    file = HeartbeatFile()
    assert heartbeats(tmp_path / "new") == []
    file.write(12.5, "step_end", True)
    with (tmp_path / "new" / str(os.getpid())).open() as read:
        file.write(13.5, "before_data", True)
        assert json.load(read)["until"] == 12.5  # whoever reads while it is replaced finds no half of it
    assert heartbeats(tmp_path / "new") == [Heartbeat(os.getpid(), 13.5, "before_data", True)]
    (tmp_path / "new" / "1").symlink_to("gone")  # as of a process that ends while its file is read
    name = Path("/proc/self/comm")
    before = name.read_text()
    name.write_text("a) b")
    try:
        assert [beat.until for beat in heartbeats(tmp_path / "new")] == [13.5]
    finally:
        name.write_text(before)
    (tmp_path / "new" / "1").unlink()
    file.remove()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_killed_process_is_none_even_if_another_has_its_number(tmp_path):
    code = "from recipes.training.heartbeat import HeartbeatFile; HeartbeatFile().write(1.0, 'step_end', False)"
    environment = os.environ | {VARIABLE: str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked for its status yet
    file = tmp_path / str(child.pid)
    assert file.is_file() and heartbeats(tmp_path) == []
    assert child.wait(60) == 0 and heartbeats(tmp_path) == []
    file.rename(tmp_path / str(os.getpid()))  # as if this process had its number
    assert heartbeats(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "inside"))
    file = HeartbeatFile()
    file.write(1.0, "step_end", False)
    file.write(2.0, "step_end", False)
    file.remove()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{VARIABLE}: {tmp_path}/file/inside: ")


def test_a_disk_that_is_full_later_leaves_no_old_sign_of_life(tmp_path, monkeypatch):
    """By which a run that goes on would soon count as hung."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = HeartbeatFile()
    file.write(1.0, "step_end", False)
    with small_files(1):
        file.write(2.0, "step_end", False)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_unless_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    HeartbeatFile().write(1.0, "step_end", False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hook", "stepped", "expected"),
    [
        ("before_backward", True, 400),  # hangs after the watchdog's seconds
        ("before_backward", False, 100 + LONG),  # the first batch compiles
        ("step_end", True, 100 + LONG),  # a checkpoint, a grid, an export
        ("eval_before_forward", True, 100 + LONG),
        ("start", False, 100 + LONG),
    ],
)
def test_how_long_a_silent_process_counts_as_well(hook, stepped, expected):
    last = Progress(100.0, hook, None)
    assert well_until(last, stepped, now=10_000.0, seconds=300.0) == expected
    assert well_until(last, stepped, now=101.0, seconds=30.0) <= 131  # its watchdog must have run, too
    if expected == 100 + LONG:
        assert well_until(last, stepped, now=10_000.0, seconds=2 * LONG) == 100 + 2 * LONG


def test_hooks_that_end_soon_are_those_of_a_batch(monkeypatch):
    seen = []
    monkeypatch.setattr("recipes.training.levers.alive", lambda hook, run: seen.append(hook))
    levers, run = Levers([]), FakeRun()
    levers.finish_gradients(run)
    for hook in ("before_data", "batch_start", "before_passes", "before_forward", "after_forward"):
        levers.call(hook, run)
    for hook in ("before_backward", "after_backward"):
        levers.call(hook, run)
    assert set(seen) == QUICK


def test_the_watchdog_writes_it_and_removes_it(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    levers, run = Levers([]), FakeRun()

    def beat(hook):
        levers.call(hook, run)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for found in heartbeats(tmp_path / "beats"):
                if found.hook == hook:
                    return found
            time.sleep(0.01)
        raise TimeoutError(hook)

    run.device = torch.device("cuda")
    with watched(0.4, tmp_path):
        before = time.monotonic()
        found = beat("before_data")
        assert found.until >= before + 0.4 and not found.on_gpu  # before a batch is done it may not have it yet
        beat("step_end")
        end = time.monotonic() + 60
        while not (tmp_path / "stacks").is_dir() and time.monotonic() < end:
            time.sleep(0.01)
        reported = time.monotonic()  # for an hour, which an export may take, it is well
        while heartbeats(tmp_path / "beats")[0].until < reported + 0.5 and time.monotonic() < end:
            time.sleep(0.01)
        (found,) = heartbeats(tmp_path / "beats")
        assert found.until >= reported + 0.5 and found.on_gpu
    assert heartbeats(tmp_path / "beats") == [] == list((tmp_path / "beats").iterdir())


def test_the_watchdog_writes_nothing_when_it_has_removed_it(tmp_path, monkeypatch):
    calls = []

    class Slow:
        def write(self, *_):
            time.sleep(0.1)
            calls.append("written")

        def remove(self):
            calls.append("removed")

    monkeypatch.setattr(watchdog, "HeartbeatFile", Slow)
    with watched(0.04, tmp_path):
        time.sleep(0.05)  # till it writes
    time.sleep(0.2)
    assert calls[-1] == "removed"
