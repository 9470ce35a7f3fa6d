"""The processes of a machine: what they are told, how they are stopped, and what their ends add up to."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.processes import Processes, rank_environments
from cluster.scheduler import Place, place_of
from cluster.status import status_of

ROOT = Path(__file__).resolve().parents[2]
# What a rank does: argv[1] maps ranks to a behaviour.
SCRIPT = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
act = json.loads(sys.argv[1]).get(rank, "0")
def stop(number, frame):
    time.sleep(0.3)  # writes a checkpoint
    print("saved", signal.Signals(number).name, flush=True)
    os._exit(85)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if act == "deaf" else stop)
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], flush=True)
if act in ("wait", "deaf"):
    time.sleep(60)
elif act.startswith("-"):
    os.kill(os.getpid(), -int(act))
sys.exit(int(act))
"""


def launch(tmp_path, behaviour, *options, environment=None):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "cluster/launch.py", "--logs", str(tmp_path / "logs"), *options]
    return subprocess.Popen(
        [*command, "--", str(script), json.dumps(behaviour)],
        cwd=ROOT, env=os.environ | (environment or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


ENDS = {
    "all done": ({}, 0),
    "asked to stop": ({"0": "85", "1": "85"}, 85),
    "a mistake beside one that waits": ({"0": "wait", "1": "2"}, 2),
    "killed": ({"0": "wait", "1": "-9"}, 137),
    "one does not listen": ({"0": "deaf", "1": "1"}, 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_status_of_a_machine(end, tmp_path):
    behaviour, status = ENDS[end]
    done = launch(tmp_path, behaviour, "--processes", "2", "--patience", "0.4")
    text, _ = done.communicate(timeout=300)
    assert done.returncode == status, text


def test_a_signal_reaches_all_processes_which_have_time_to_save(tmp_path):
    started = launch(
        tmp_path, {"2": "wait", "3": "wait"}, "--machines", "2", "--processes", "2", "--status", str(tmp_path / "s"),
        "--hosts", "n7,n3", environment={"SLURMD_NODENAME": "n3", "MASTER_ADDR": "n7"},
    )  # fmt: skip
    logs = [tmp_path / "logs" / f"rank-0000{rank}.log" for rank in (2, 3)]
    while not all(log.is_file() and "rank" in log.read_text() for log in logs):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGUSR1)
    text, _ = started.communicate(timeout=300)
    # Slurm would end the other machines at the first task that fails, so the file says it instead.
    assert started.returncode == 0 and (tmp_path / "s" / "1").read_text() == "85\n", text
    assert "rank" not in text  # the first of all ranks prints, not of each machine
    assert [log.read_text().splitlines() for log in logs] == [
        [f"rank {rank} of 4 {rank - 2} n7", "saved SIGUSR1"] for rank in (2, 3)
    ]


def test_the_first_rank_prints_here_as_well(tmp_path):
    """Both logs go on from an earlier start, and an outer launcher's variables are not those of the ranks."""
    logs = [tmp_path / "logs" / f"rank-0000{rank}.log" for rank in (0, 1)]
    for log in logs:
        log.parent.mkdir(exist_ok=True)
        log.write_text("before\n")
    started = launch(tmp_path, {}, "--processes", "2", environment={"RANK": "7", "WORLD_SIZE": "9"})
    text, _ = started.communicate(timeout=300)
    assert "rank 0 of 2" in text and "rank 1 of 2" not in text
    assert [log.read_text().splitlines()[:2] for log in logs] == [
        ["before", f"rank {rank} of 2 {rank} 127.0.0.1"] for rank in (0, 1)
    ]


def test_the_launcher_ends_when_the_last_line_of_the_first_rank_is_copied(tmp_path):
    """A step of Slurm, or a container, ends with the launcher, and takes `tee` with it: here one that is slow."""
    copier = tmp_path / "bin" / "tee"
    copier.parent.mkdir()
    copier.write_text(f'#!/bin/sh\ntext=$(cat)\nsleep 0.4\necho "$text" | {shutil.which("tee")} "$@"\n')
    copier.chmod(0o755)
    started = launch(tmp_path, {}, environment={"PATH": f"{copier.parent}:{os.environ['PATH']}"})
    assert started.wait(timeout=300) == 0
    assert "rank 0 of 1" in (tmp_path / "logs" / "rank-00000.log").read_text()
    started.stdout.close()


def test_logs_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "logs").touch()
    started = launch(tmp_path, {}, "--status", str(tmp_path / "s"))
    text, _ = started.communicate(timeout=300)
    assert text.startswith(f"error: {tmp_path}/logs: File exists; ") and text.count("\n") == 1
    assert started.returncode == 2 and (tmp_path / "s" / "0").read_text() == "1\n"  # a disk may be mounted later


def test_a_launch_of_no_process_is_not_taken_for_one_that_is_done(tmp_path):
    started = launch(tmp_path, {}, "--processes", "0")
    text, _ = started.communicate(timeout=300)
    assert (started.returncode, text) == (2, "error: --processes 0: give 1 or more\n")


def test_a_signal_to_all_processes_at_once_loses_no_line(tmp_path):
    started = launch(tmp_path, {"0": "wait", "1": "wait"}, "--processes", "2")
    logs = [tmp_path / "logs" / f"rank-0000{rank}.log" for rank in (0, 1)]
    while not all(log.is_file() and "rank" in log.read_text() for log in logs):
        assert started.poll() is None
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGTERM)  # as Slurm does
    text, _ = started.communicate(timeout=300)
    assert started.returncode == 85, text
    assert "saved SIGTERM" in text and all("saved SIGTERM" in log.read_text() for log in logs)


READY = "until [ -e ready ]; do sleep 0.05; done; exit 1"


@pytest.mark.parametrize(
    ("first", "second", "status", "codes"),
    [
        ("exit 0", "sleep 0.4", 0, [0, 0]),
        ("exit 85", "sleep 0.4", 85, [85, 0]),  # it may write a checkpoint
        ("touch ready; exec sleep 20", READY, 1, [-15, 1]),
        ("trap '' TERM; touch ready; exec sleep 20", READY, 1, [-9, 1]),
    ],
)
def test_only_a_failure_ends_the_others(tmp_path, monkeypatch, first, second, status, codes):
    monkeypatch.chdir(tmp_path)
    processes = Processes(["sh", "-c", 'eval "$ACT"'], [{"ACT": first}, {"ACT": second}], None, patience=0.1)
    assert processes.run() == status and [process.returncode for process in processes.started] == codes


@pytest.mark.parametrize("fails", [False, True])
def test_what_happens_while_processes_start(fails):
    """A signal reaches all of them. An error leaves none."""
    processes = Processes(["sleep", "20"], [{}, {}], None, patience=1.0)
    start, before = processes._start, signal.getsignal(signal.SIGUSR1)

    def start_late(environment):
        if processes.started and fails:
            raise OSError("on purpose")
        if processes.started:
            os.kill(os.getpid(), signal.SIGUSR1)
        return start(environment)

    processes._start = start_late
    with pytest.raises(OSError, match="on purpose") if fails else nullcontext():
        processes.run()
    codes = [process.returncode for process in processes.started]
    assert codes == ([-signal.SIGKILL] if fails else [-signal.SIGUSR1] * 2)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("codes", "status"),
    [([0, 0], 0), ([0, 85], 85), ([85, 2, -9], 2), ([85, -9], 137), ([0, 1, 3], 1), ([-15, 85], 143)],
)
def test_statuses_add_up(codes, status):
    assert status_of(codes) == status


def test_each_scheduler_says_which_machine_this_is():
    address = {"MASTER_ADDR": "first", "MASTER_PORT": "1234"}
    slurm = place_of({**address, "SLURMD_NODENAME": "c"}, 2, ["a", "c"])
    kubernetes = place_of({**address, "JOB_COMPLETION_INDEX": "1"}, 2)
    sky = place_of({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "first\nsecond", "MASTER_PORT": "1234"}, 2)
    assert slurm == kubernetes == sky == Place(1, "first", 1234)
    assert place_of({}, 1) == Place(0, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environment", "hosts", "text"),
    [
        ({}, [], "which of 2 machines"),
        ({"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "a"}, [], "'2'"),
        ({"SLURMD_NODENAME": "z", "MASTER_ADDR": "a"}, ["a", "b"], "'z'"),
        ({"JOB_COMPLETION_INDEX": "1"}, [], "MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, [], "MASTER_PORT is 'http'"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "MASTER_PORT": "65536"}, [], "MASTER_PORT is '65536'"),
        ({"SLURMD_NODENAME": "a"}, ["a"], "names 1 machines"),
    ],
)
def test_a_machine_that_does_not_know_its_place_says_why(environment, hosts, text):
    with pytest.raises(ValueError, match=text):
        place_of(environment, 2, hosts)


def test_ranks_count_over_machines():
    (first, second) = rank_environments(Place(3, "a", 5), machines=4, processes=2)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("6", "7", "1", "8")
    assert (first["NODE_RANK"], first["LOCAL_WORLD_SIZE"], first["MASTER_PORT"]) == ("3", "2", "5")
