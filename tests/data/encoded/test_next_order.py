"""Orders that are made ahead are those of streaming, in all epochs and after a resumption."""

import errno
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data.encoded import dataset, next_order
from data.encoded.next_order import NextOrder
from tests.data.encoded.test_dataset import BATCH, assert_same, copies, make_loader, write

OOM = Path("/proc/self/oom_score_adj")


def test_the_next_epochs_orders_are_made_by_other_processes(tmp_path, monkeypatch):
    made, make = tmp_path / "made", dataset.EncodedDataset._make_order

    def noted(self, world, epoch, sample):
        with made.open("a") as file:
            print(epoch, os.getpid(), file=file)
        return make(self, world, epoch, sample)

    monkeypatch.setattr(dataset.EncodedDataset, "_make_order", noted)
    monkeypatch.setattr(dataset, "AHEAD_FROM", 43)
    stock, fast = copies(tmp_path, write(tmp_path / "set", 43))
    stock, fast = make_loader(False, stock, 2), make_loader(True, fast, 2)
    for _ in range(3):
        assert_same(list(stock), list(fast))
    lines = [tuple(map(int, line.split())) for line in made.read_text().splitlines()]
    assert [epoch for epoch, _ in lines][:3] == [0, 1, 2] and len({process for _, process in lines}) == len(lines)

    # An order that is begun is of no use where another position is loaded, also one of the same epoch.
    for epoch, sample in ((3, 2 * BATCH), (7, 0), (7, BATCH)):
        state = fast.state_dict() | {"epoch": epoch, "sample_in_epoch": sample}
        stock.dataset.load_state_dict(state)
        fast.load_state_dict(state)
        for _ in range(2):
            assert_same(list(stock), list(fast))


def test_few_samples_have_their_order_made_when_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(NextOrder, "begin", lambda *arguments: pytest.fail("of 43 samples"))
    loader = make_loader(True, copies(tmp_path, write(tmp_path / "set", 43))[0], 1)
    assert sum(len(batch["seed"]) for batch in loader) == 43


def test_an_order_is_given_once_and_by_its_key_only(monkeypatch):
    fork, processes, orders = os.fork, [], NextOrder()
    monkeypatch.setattr(os, "fork", lambda: processes.append(fork()) or processes[-1])
    assert orders.take(1) is None
    orders.begin(1, lambda: np.array([1, 2]))
    assert orders.take(1).tolist() == [1, 2] and orders.take(1) is None
    orders.begin(1, lambda: time.sleep(1e6))
    assert orders.take(2) is None
    orders.begin(3, lambda: time.sleep(1e6))
    orders.begin(4, lambda: np.array([4]))  # it takes the place of the one that was not taken
    assert orders.take(4).tolist() == [4]
    assert len(processes) == 4 and not any(os.path.exists(f"/proc/{process}") for process in processes)


def test_a_process_that_fails_makes_no_order(capfd):
    orders = NextOrder()

    def fail():
        raise MemoryError

    for make in (fail, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: np.array([object()])):
        orders.begin(1, make)
        assert orders.take(1) is None


def test_where_memory_is_lacking_the_process_ends_before_the_training():
    own, orders = int(OOM.read_text()), NextOrder()
    orders.begin(1, lambda: np.array([int(OOM.read_text())]))
    assert orders.take(1).tolist() == [1000] and int(OOM.read_text()) == own


def test_a_process_that_hangs_is_waited_for_with_a_limit(monkeypatch):
    monkeypatch.setattr(next_order, "LONGEST", 0.1)
    orders = NextOrder()
    orders.begin(1, lambda: time.sleep(1e6))
    assert orders.take(1) is None


def test_where_no_process_is_started_or_none_is_waited_for_there_is_no_order(monkeypatch):
    """Its epoch makes it, as without this class."""
    orders = NextOrder()
    for name in ("memfd_create", "fork"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable")))
            orders.begin(1, lambda: np.array([1]))
        assert orders.take(1) is None
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets how processes end
    try:
        orders.begin(1, lambda: np.array([1]))
        assert orders.take(1) is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    links = Path("/proc/self/fd").iterdir()
    assert not any("order of the next epoch" in os.readlink(link) for link in links if link.is_symlink())


def begin_and_end(pipe):
    orders = NextOrder()
    orders.begin(1, lambda: pipe.send(os.getpid()) or time.sleep(1e6))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_process_ends_with_the_worker_that_forked_it():
    here, there = get_context("fork").Pipe()
    worker = get_context("fork").Process(target=begin_and_end, args=(there,))
    worker.start()
    process = here.recv()
    here.send(None)
    worker.join()
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail("it still runs")
