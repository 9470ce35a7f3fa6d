"""Training batches of pictures, some of which kill the processes that decode them."""

import ctypes
import itertools
import json
import os
import signal
import time
from multiprocessing import active_children

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from benchmarks.killing import fork
from data.loading import Placement
from data.pictures import pictures
from data.sources.filters import Filter
from data.workers.crash_log import CRASHES
from tests.data.test_pictures import Numbered, numbers


class Killing(Filter):
    """One picture kills the process that decodes it."""

    def __init__(self, key, kill):
        super().__init__()
        self.key, self.kill = key, kill

    def decode(self, sample, shrink_to=None):
        if sample.key == self.key:
            self.kill()
        return super().decode(sample, shrink_to)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """PyTorch looks for workers that have died after 5 s without a batch; not in each of these tests."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def by(number):
    return lambda: os.kill(os.getpid(), number)


def load(source, output=None, training=True, workers=0, **arguments):
    placement = Placement(4, training, output=output)
    return pictures(placement, {}, source=source, resolution=8, workers=workers, shuffle_buffer=4, **arguments).loader


def take(loader, batches=8, pause=0.0):
    found = []
    for batch in itertools.islice(iter(loader), batches):
        found.append(numbers(batch))
        time.sleep(pause)
    return found


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_picture_that_kills_workers_twice_is_left_out(tmp_path, capfd, number):
    """The batches are those of a source in which it is broken, also when it kills while the trainer is at work."""
    before = set(active_children())
    expected = take(load(Numbered(3, 8, reject=[5]), workers=2))
    found = take(load(Numbered(3, 8), tmp_path, workers=2, filter=Killing("5", by(number))), pause=0.1)
    assert found == expected and 5 not in sum(found, [])
    assert set(active_children()) <= before
    printed = capfd.readouterr().out.splitlines()
    lines = [line for line in printed if " at sample 5 (5) of shard0: " in line]
    assert [line.split(": ")[-1] for line in lines] == ["trying again", "rejected as kills_decoder"]
    deaths = [json.loads(line) for line in (tmp_path / CRASHES).read_text().splitlines()]
    assert [(death["label"], death["shard"], death["sample"], death["key"]) for death in deaths] == [
        ("train", "shard0", 5, "5")
    ] * 2
    # The next start knows it, and says so.
    assert take(load(Numbered(3, 8), tmp_path, workers=1, filter=Killing("5", by(number))), 7)
    assert "again at sample 5 (5) of shard0: rejected as kills_decoder" in capfd.readouterr().out
    assert len((tmp_path / CRASHES).read_text().splitlines()) == 2


def test_a_worker_that_has_not_begun_when_another_dies_is_ended_too(tmp_path, monkeypatch):
    """It would go on beside its successor, and write where it is into the same place."""
    before, left, died = set(active_children()), [], tmp_path / "died"

    class KillingOnce(Filter):
        def decode(self, sample, shrink_to=None):
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().decode(sample, shrink_to)

    def begin(worker):
        if worker == 1 and not (tmp_path / CRASHES).exists():
            time.sleep(60)

    loader = load(Numbered(3, 8), tmp_path, workers=2, filter=KillingOnce())
    loader.worker_init_fn = begin
    add = loader.dataset.deaths.add

    def note(death, batches):
        left.extend(set(active_children()) - before)
        add(death, batches)

    monkeypatch.setattr(loader.dataset.deaths, "add", note)
    assert take(loader, 4) and not left


@pytest.mark.parametrize("training", [True, False])
def test_without_workers_the_third_start_leaves_it_out(tmp_path, capfd, training):
    def start(kill):
        def run():
            loader = load(Numbered(3, 8), tmp_path, training, filter=Killing("13", kill))
            (tmp_path / "batches.json").write_text(json.dumps(take(loader)))

        child = fork(run, tmp_path / "log.txt", {})
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fault():
        ctypes.string_at(0)

    assert start(by(signal.SIGKILL)) == -signal.SIGKILL  # from outside: no picture's fault
    assert start(fault) == start(fault) == -signal.SIGSEGV
    assert not start(fault)
    assert json.loads((tmp_path / "batches.json").read_text()) == take(load(Numbered(3, 8, [13]), training=training))
    printed = capfd.readouterr().out
    for end in ("trying again", "again at sample 5 (13) of shard1: rejected as kills_decoder"):
        assert end in printed, printed
    assert not list(tmp_path.glob(".place-*")) and not list(tmp_path.glob(".fault-*"))


def test_a_shard_that_kills_its_reader_ends_the_run_with_one_line(tmp_path):
    class Deadly(Numbered):
        def read(self, shard):
            for number, sample in enumerate(super().read(shard)):
                if (shard, number) == ("shard1", 2):
                    os._exit(3)
                yield sample

    with pytest.raises(ValueError, match="shard1: processes that read it die at sample 2 of shard1; take") as error:
        take(load(Deadly(3, 8), tmp_path, workers=1))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"{CRASHES} notes it: remove the file to try again"):
        load(Deadly(3, 8), tmp_path, workers=1)
    load(Numbered(1, 8), tmp_path)  # a source without that shard
    (tmp_path / CRASHES).write_text('{"label": "train"')  # by a disk that was full
    load(Deadly(3, 8), tmp_path)
    (tmp_path / CRASHES).write_bytes(b'{"label": "\xf4rain"}\n')  # a changed bit
    load(Deadly(3, 8), tmp_path)


def test_workers_leave_a_signal_to_stop_to_the_trainer(capfd):
    loader = load(Numbered(3, 8), workers=2)
    batches = iter(loader)
    found = [numbers(next(batches)) for _ in range(2)]  # one of each worker
    workers = [process for process in active_children() if process.pid in loader.dataset.deaths.places.processes()]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    found += [numbers(next(batches)) for _ in range(20)]  # more than were ready
    assert len(workers) == 2 and all(worker.is_alive() for worker in workers)
    assert found == take(load(Numbered(3, 8), workers=2), 22) and "trying again" not in capfd.readouterr().out


def test_workers_that_die_of_something_else_end_the_run_with_one_line(tmp_path):
    loader = load(Numbered(3, 8), tmp_path, workers=1)
    loader.collate_fn = lambda samples: os._exit(4)  # after decoding
    with pytest.raises(ValueError, match="a decoding process died .*lower workers") as error:
        take(loader)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_wait_for_each_other_before_they_read_the_deaths(tmp_path, monkeypatch, ranks):
    """One alone must not: in a process that was forked from a member of a group, a collective never ends."""
    waited = []
    group = {"is_initialized": True, "get_rank": ranks - 1, "get_world_size": ranks}
    for name, value in group.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: waited.append(ranks))
    load(Numbered(3, 8), tmp_path)
    assert waited == [2] * (ranks > 1)
