"""Signals that ask a run to stop."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes import train
from recipes.config.recipe import to_yaml
from recipes.training import stop
from tests.ranks import launch, variables_of
from tests.recipes.training.launchers import text_of


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_between_batches_a_signal_waits(number):
    before = signal.getsignal(number)
    with stop.stop_signals():
        stop.begin_batches()
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.caught() == signal.Signals(number).name
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.caught() == signal.Signals(number).name  # the first one
    assert signal.getsignal(number) is before and not stop.requested()


def wait_in_cpp(folder):
    """What process groups do when they start: wait for a rank, which here never comes, without a line of Python."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    store.set_timeout(timedelta(seconds=600))
    store.wait(["the other rank"])


@pytest.mark.parametrize("wait", [lambda folder: time.sleep(600), wait_in_cpp], ids=["python", "c++"])
def test_before_the_first_batch_a_signal_ends_the_process(tmp_path, wait):
    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        with stop.stop_signals():
            (tmp_path / "waits").write_text("yes")
            wait(tmp_path)
        os._exit(0)
    text_of(tmp_path / "waits")
    time.sleep(0.5)  # till it does
    os.kill(child, signal.SIGTERM)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == stop.EXIT_CODE == 85
    assert (tmp_path / "out").read_text() == "SIGTERM: nothing to save; start it again to go on\n"


def test_a_process_without_standard_output_ends_at_a_signal_too():
    """It was started by `>&-`. The line about it was an error, which ended the thread in place of the process."""
    numbers, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM, stop.NO_SIGNAL]))
    child = os.fork()
    if not child:
        try:
            sys.__stdout__ = None
            stop._end_at_once(numbers, launched=False)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == stop.EXIT_CODE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_packages_are_imported_a_signal_ends_the_process(tmp_path, quick_recipe, number):
    """Schedulers would count a failure by the status of a signal that nobody handles, or that the handlers give which
    Composer's import sets."""
    (tmp_path / "recipe.yaml").write_text(to_yaml(quick_recipe(tmp_path / "run")))

    def import_for_ever(name):
        signal.signal(number, lambda *_: time.sleep(600))
        (tmp_path / "waits").write_text("yes")
        time.sleep(600)

    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["recipes/train.py", str(tmp_path / "recipe.yaml")]
        train.importlib = SimpleNamespace(import_module=import_for_ever)
        train.main()
        os._exit(0)
    text_of(tmp_path / "waits")
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == stop.EXIT_CODE
    said = f"{signal.Signals(number).name}: nothing to save; start it again to go on\n"
    assert (tmp_path / "out").read_text().endswith(said)


@pytest.mark.parametrize(("launched", "status"), [(False, 130), (True, 85)])
def test_a_second_ctrl_c_ends_a_process_without_a_launcher_at_once(tmp_path, monkeypatch, launched, status):
    """torchrun and cluster/launch.py pass the first one on, which the terminal has sent to the ranks already."""
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        with stop.stop_signals():
            stop.begin_batches()
            os.kill(os.getpid(), signal.SIGINT)
            while not launched and not (tmp_path / "out").read_text():  # two that come at once may count as one
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            if not launched:
                time.sleep(60)  # a batch
        os._exit(stop.EXIT_CODE)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    said = (tmp_path / "out").read_text().splitlines()
    assert said == ([] if launched else ["SIGINT: ends after this batch; a second one ends it at once", said[-1]])
    assert launched or said[-1] == "SIGINT: ended without a checkpoint"


@pytest.mark.parametrize(
    ("numbers", "status"), [([signal.SIGTERM], 85), ([signal.SIGINT, signal.SIGINT], 130)], ids=["first", "second"]
)
def test_it_ends_although_nobody_reads_what_it_says(tmp_path, monkeypatch, numbers, status):
    """Ctrl-C also ends `tee`."""
    monkeypatch.delenv("RANK", raising=False)
    read, write = os.pipe()
    os.close(read)
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        with stop.stop_signals():
            if len(numbers) > 1:
                stop.begin_batches()
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.3)  # two that come at once may count as one
        os._exit(0)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


@pytest.mark.parametrize("imports", [False, True])
def test_a_run_in_the_background_goes_on_ignoring_ctrl_c(imports):
    """Also after an import has set handlers of its own for all signals."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop.stop_signals():
            if imports:
                for number in stop.SIGNALS:
                    signal.signal(number, lambda *_: pytest.fail("not the run's own"))
                stop.catch_again()
            stop.begin_batches()
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested()
        stop.catch_again()  # after the run: nothing
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != stop._catch
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_of_components_do_not_keep_signals_from_the_run():
    """Such a run trained on until it was killed, or ended at once without a checkpoint, with the handler's status."""
    heard = []
    with stop.stop_signals():
        signal.signal(signal.SIGTERM, lambda *_: pytest.fail("set before the first batch"))
        stop.begin_batches()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()
    with stop.stop_signals():
        stop.begin_batches()
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        stop.begin_batches()  # of the next batch
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while time.monotonic() < end and not stop.requested():
            time.sleep(0.01)
        assert stop.requested() and stop.caught() == "SIGTERM" and heard == [signal.SIGTERM]


def test_a_process_that_ends_after_its_checkpoint_keeps_its_status():
    """Launchers end it when another rank was faster."""
    child = os.fork()
    if not child:
        try:
            with stop.stop_signals():
                stop.begin_batches()
                raise stop.StartAgain
        except SystemExit as error:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(error.code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == stop.EXIT_CODE


STAYS = """
import multiprocessing, runpy, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from recipes.config import command_line
from recipes.training import stop

def stay():
    while True:
        time.sleep(0.01)

def read(*_):
    if kind == "pool":
        pool.submit(int).result()  # its thread waits for more
    else:
        made = multiprocessing.Process if kind == "process" else threading.Thread
        made(target=stay, name="my-uploads").start()
    print("printed")
    if end == "signal":
        raise stop.StartAgain
    if end == "mistake":
        command_line.fail(["a mistake"])
    if end == "bug":
        raise RuntimeError("a bug")
    sys.exit()

kind, end, script = sys.argv[1:]
pool = ThreadPoolExecutor(1)
stop.SAID_AFTER, stop.PATIENCE, stop.PATIENCE_TO_START_AGAIN = 0.2, 0.5, 0.4
command_line.read_command_line = read
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("kind", "end", "status"),
    [
        ("thread", "signal", 85),
        ("process", "signal", 85),
        ("pool", "signal", 85),
        ("thread", "normal", 0),
        ("process", "mistake", 2),
        ("thread", "bug", 1),
    ],
)
def test_a_run_ends_although_a_component_works_on(kind, end, status):
    """Python waited for it for ever: the run held its GPUs when all was written. After a signal, nothing but SIGKILL
    ended that, with a status that says nothing."""
    command = [sys.executable, "-c", STAYS, kind, end, train.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(train.__file__).parents[1])
    assert (done.returncode, done.stdout) == (status, "printed\n"), done.stderr
    lines = done.stderr.splitlines()
    if kind != "pool":
        ended, waits = lines.pop(), lines.pop()
        patience = 0.4 if end == "signal" else 0.5
        assert waits.endswith(f"waits up to {patience} s for the {kind} my-uploads, which a component has started")
        assert ended.startswith(f"ended although the {kind} my-uploads still ran {patience} s after the run: end")
    assert lines[-1:] == {"mistake": ["error: a mistake"], "bug": ["RuntimeError: a bug"]}.get(end, [])


def test_a_signal_to_a_forked_process_is_its_own():
    child = os.fork()
    if not child:
        with stop.stop_signals():  # no batch has begun
            worker = os.fork()
            if not worker:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(3)
            status = os.waitpid(worker, 0)[1]
            time.sleep(0.2)
        os._exit(os.waitstatus_to_exitcode(status))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_second_use_begins_before_its_first_batch():
    stop.begin_batches()
    for _ in range(2):
        with stop.stop_signals():
            assert not stop._in_batches
            stop.begin_batches()


def test_the_end_of_the_launcher_is_a_signal(tmp_path):
    launcher = os.fork()
    if not launcher:
        os.environ["RANK"] = "0"
        if not os.fork():
            with stop.stop_signals():
                stop.begin_batches()
                (tmp_path / "started").write_text("yes")
                while not stop.requested():
                    time.sleep(0.01)
                (tmp_path / "stopped").write_text(stop.caught())
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    text_of(tmp_path / "started")
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert text_of(tmp_path / "stopped") == "SIGTERM"


def test_a_launcher_that_has_ended_before_is_a_signal(tmp_path, monkeypatch):
    """While packages were imported. Nobody would end the process, which holds a GPU and the lock of the run."""
    monkeypatch.setenv("RANK", "0")
    launcher = os.fork()
    if not launcher:
        if not os.fork():
            (tmp_path / "started").write_text("yes")
            text_of(tmp_path / "ended")
            os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
            with stop.stop_signals():
                time.sleep(5)
            os.write(1, b"trained")
        text_of(tmp_path / "started")
        os._exit(0)
    os.waitpid(launcher, 0)
    (tmp_path / "ended").write_text("yes")
    assert text_of(tmp_path / "out") == "SIGTERM: nothing to save; start it again to go on\n"


@pytest.mark.parametrize(("launched", "number"), [(True, signal.SIGTERM), (False, 0)])
def test_only_the_end_of_a_launcher_is_one(monkeypatch, launched, number):
    """The end of a shell is not, for what runs in its background. After the run it is none any more."""
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    found = []
    with stop.stop_signals():
        found.append(signal_of_parents_end())
    found.append(signal_of_parents_end())
    assert found == [number, 0]


def signal_of_parents_end():
    """What `end_with_parent` has set for this process."""
    number = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(number)) == 0  # PR_GET_PDEATHSIG
    return number.value


@pytest.mark.slow
def test_what_launchers_do(tmp_path):
    """The table of docs/resilience.md: what a caller sees. Whatever the launcher, both ranks save a checkpoint."""
    done = launch(1, Path(__file__).with_name("launchers.py"), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    statuses = {event: status for event, (status, *_) in report.items()}
    assert statuses == {
        "composer SIGTERM": 85,
        "composer SIGINT": 85,
        "composer Ctrl-C": 85,
        "composer rank": 85,
        "torchrun SIGTERM": 1,
        "torchrun SIGUSR1": -signal.SIGUSR1,
        "torchrun rank": 1,
        "torchrun Ctrl-C": 1,
    }
    for event, (_, signals, told) in report.items():
        assert set(signals) == {"SIGINT" if event.endswith("Ctrl-C") else "SIGTERM"}, report
        if event.startswith("composer"):  # ranks in tests, which no launcher starts, are told the same
            port = int(told[0]["MASTER_PORT"])
            assert all(variables_of(rank, 2, port).items() <= told[rank].items() for rank in range(2)), told


def test_the_exit_code():
    with pytest.raises(SystemExit) as error:
        raise stop.StartAgain
    assert error.value.code == 85
