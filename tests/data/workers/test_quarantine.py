"""Which samples and shards are left out when decoding processes die."""

import gc
import multiprocessing
import signal
import time
import weakref
from types import SimpleNamespace

import pytest

from data.sources.base import InputShard, Position
from data.workers.deaths import DecoderDied, Places, keep_alarms, worker_deaths
from data.workers.quarantine import LIMIT, Quarantine

SHARDS = [InputShard("train", "a"), InputShard("train", "b")]


def death(shard, number, key=""):
    reason = "DataLoader worker (pid 7) is killed by signal: Segmentation fault."
    return DecoderDied(reason, [Position(shard, number, key)])


def test_two_deaths_reject_a_sample_and_a_third_gives_its_shard_up():
    quarantine = Quarantine("encode")
    assert quarantine.add(death(SHARDS[0], 3), 0) == {} and not quarantine.killers
    assert quarantine.add(death(SHARDS[1], 3), 1) == {} and not quarantine.killers
    assert quarantine.add(death(SHARDS[0], 3), 2) == {}
    assert quarantine.killers == {Position(SHARDS[0], 3)}
    assert quarantine.add(death(SHARDS[0], 3, "decoded by a worker that did not know"), 3) == {}
    assert quarantine.add(death(SHARDS[0], 3), 4) == {SHARDS[0]: "processes that read it die at sample 3 of a"}


def test_deaths_without_an_image_between_them_end_the_job():
    quarantine = Quarantine("encode")
    for number in range(LIMIT):
        quarantine.add(death(SHARDS[0], number), 5)
    with pytest.raises(ValueError, match="a decoding process died .*Segmentation fault.*shm"):
        quarantine.add(death(SHARDS[0], LIMIT), 5)
    quarantine.add(death(SHARDS[0], LIMIT), 6)


def test_a_death_that_is_of_no_sample_ends_the_job():
    with pytest.raises(ValueError, match="a decoding process died"):
        Quarantine("encode").add(DecoderDied("DataLoader worker (pid 7) exited unexpectedly", []), 0)


def test_places_are_those_of_processes(monkeypatch):
    places = Places(SHARDS)
    for worker, (process, shard, number) in enumerate([(70, SHARDS[0], 5), (71, SHARDS[1], 2), (72, SHARDS[1], 9)]):
        monkeypatch.setattr("data.workers.deaths.get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        places.mark(shard, number)
    assert places.of({72, 70, 5}) == [Position(SHARDS[0], 5), Position(SHARDS[1], 9)]
    monkeypatch.setattr("data.workers.deaths.get_worker_info", lambda: None)
    places.mark(SHARDS[1], 1)  # in the process of the encoders
    assert len(places.of({70, 71, 72})) == 3


@pytest.mark.parametrize("finished", [False, True])
def test_a_worker_that_dies_while_it_hands_over_a_batch(monkeypatch, finished):
    """The pipe breaks before PyTorch has noticed; a worker that has read everything blames no sample."""
    places = Places(SHARDS)
    monkeypatch.setattr("data.workers.deaths.get_worker_info", lambda: SimpleNamespace(id=2))

    def work():
        places.mark(SHARDS[1], 4)
        if finished:
            places.leave()
        time.sleep(0.2)  # it dies after the pipe has broken

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    expected = pytest.raises(DecoderDied, match="exited while it handed over a batch")
    with expected as death, worker_deaths(places, workers=1):
        raise EOFError
    assert f"(pid(s) {worker.pid})" in death.value.reason
    assert death.value.positions == ([] if finished else [Position(SHARDS[1], 4)])


def test_a_death_is_freed_when_it_has_been_handled(monkeypatch):
    """Its traceback holds the loader's iterator, which ends the workers when it is freed."""
    monkeypatch.setattr(Places, "ended", lambda self: {72})
    gc.disable()  # it would find cycles
    try:
        try:
            with worker_deaths(Places(SHARDS), workers=1):
                raise EOFError
        except DecoderDied as death:
            held = weakref.ref(death)
        assert held() is None
    finally:
        gc.enable()


def test_a_pipe_that_breaks_before_pytorch_raises(monkeypatch):
    places = Places(SHARDS)
    monkeypatch.setattr("data.workers.deaths.get_worker_info", lambda: SimpleNamespace(id=2))
    monkeypatch.setattr("os.getpid", lambda: 72)
    places.mark(SHARDS[1], 4, "key")
    monkeypatch.setattr(Places, "ended", lambda self: set())

    def raise_it(seconds):
        raise RuntimeError("DataLoader worker (pid 72) exited unexpectedly with exit code 3.")

    monkeypatch.setattr(time, "sleep", raise_it)
    with pytest.raises(DecoderDied, match="exit code 3") as death, worker_deaths(places, workers=1):
        raise ConnectionResetError
    assert [(position, position.key) for position in death.value.positions] == [(Position(SHARDS[1], 4), "key")]


def test_a_pipe_that_breaks_without_a_death_is_no_death(monkeypatch):
    monkeypatch.setattr("data.workers.deaths.NOTICED", 0.1)
    with pytest.raises(ConnectionResetError), worker_deaths(Places(SHARDS), workers=1):
        raise ConnectionResetError


def test_a_bus_error_blames_no_sample():
    """Of a full /dev/shm. `keep_alarms` keeps what PyTorch's handler says, and the wait for a batch raises less."""

    def alarm(number, frame):
        raise RuntimeError(
            "DataLoader worker (pid 72) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit."
        )

    before = signal.signal(signal.SIGCHLD, alarm)
    try:
        keep_alarms()
        signal.raise_signal(signal.SIGCHLD)
        no_sample = pytest.raises(ValueError, match=r"died \(DataLoader worker .* Bus error\); .* of shared memory")
        with no_sample, worker_deaths(Places(SHARDS), workers=1):
            raise RuntimeError("DataLoader worker (pid(s) 72) exited unexpectedly")
    finally:
        signal.signal(signal.SIGCHLD, before)
        Places(SHARDS).forget()
