"""The helper process: tasks, errors, and when it ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.killing import fork
from data.system.errors import Outage
from data.system.helper_process import HelperProcess
from tests.ranks import ROOT

SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from data.system.errors import Outage
from data.system.helper_process import serve

def act(task):
    print("what a library prints is no answer")
    os.write(1, b"also in C\\n")
    if "error" in task:
        raise (Outage if task["outage"] else ValueError)(task["error"])
    if "status" in task:
        os._exit(task["status"])
    with open(task["file"], "a") as file:
        print(os.getpid(), task["text"], file=file)
    time.sleep(task.get("seconds", 0))

serve(act)
"""


@pytest.fixture
def process(tmp_path):
    (tmp_path / "noting.py").write_text(SCRIPT)
    process = HelperProcess(tmp_path / "noting.py")
    yield process
    process.end()


def notes(tmp_path):
    """(number of the process, text) of what was noted."""
    lines = (tmp_path / "notes").read_text().splitlines()
    return [(int(number), text) for number, text in (line.split(" ", 1) for line in lines)]


def until_noted(tmp_path):
    end = time.monotonic() + 60
    while not (tmp_path / "notes").exists() or not notes(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_process_does_one_task_after_another(process, tmp_path):
    file = str(tmp_path / "notes")
    process.do({"file": file, "text": "ä"})
    with pytest.raises(ValueError, match="^no such\nbucket$") as raised:
        process.do({"error": "no such\nbucket", "outage": False})
    assert type(raised.value) is ValueError
    with pytest.raises(Outage, match="^no answer$"):
        process.do({"error": "no answer", "outage": True})
    with pytest.raises(ValueError, match="No such file or directory"):
        process.do({"file": str(tmp_path / "none" / "notes"), "text": ""})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # as Slurm does, to all processes of a job
        os.kill(notes(tmp_path)[0][0], number)
    process.do({"file": file, "text": "second"})
    first, second = notes(tmp_path)
    assert (first[1], second[1]) == ("ä", "second") and first[0] == second[0] != os.getpid()
    assert os.getsid(first[0]) == first[0]  # Ctrl-C does not reach it, even before it ignores that
    with pytest.raises(ValueError, match="^noting: the process has ended with status 3$"):
        process.do({"status": 3})
    process.do({"file": file, "text": "third"})  # by another process
    assert notes(tmp_path)[2][0] != first[0]


def test_it_is_killed_in_the_midst_of_a_task(process, tmp_path):
    with ThreadPoolExecutor(1) as thread:
        task = thread.submit(process.do, {"file": str(tmp_path / "notes"), "text": "begun", "seconds": 600})
        until_noted(tmp_path)
        process.kill()
        with pytest.raises(ValueError, match="^noting: the process has ended with status -9$"):
            task.result(60)


def test_it_ends_though_a_forked_process_holds_its_pipe(process, tmp_path):
    process.start()
    forked = fork(lambda: time.sleep(60), tmp_path / "log.txt", {})
    try:
        process.end()
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a signal when a parent dies")
def test_it_dies_with_the_process_that_started_it(process, tmp_path):
    def parent():
        process.do({"file": str(tmp_path / "notes"), "text": "begun", "seconds": 600})

    child, end = fork(parent, tmp_path / "log.txt", {}), time.monotonic() + 60
    until_noted(tmp_path)
    ((number, _),) = notes(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while alive(number) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(number)
    late = [sys.executable, str(tmp_path / "noting.py"), str(child)]  # it asks for the signal after that death
    assert subprocess.run(late, stdin=subprocess.DEVNULL, timeout=60).returncode == 1


def alive(number):
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"  # nobody may be there to ask for its status
    except FileNotFoundError:
        return False
