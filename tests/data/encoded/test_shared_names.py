"""Several runs on one machine: names of shared memory, and caches."""

import json
import multiprocessing
import os
import threading
from multiprocessing.shared_memory import SharedMemory, _posixshmem
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from streaming.base.constant import RESUME
from streaming.base.shared import memory, prefix
from streaming.base.world import World

from data.encoded.sets import local_set
from data.encoded.shared_names import lock_cache, own_names
from data.latents import latents
from data.loading import Placement
from tests.locks import held_by_a_child


def register(folder, barrier, results):
    """What a data set does first, at the same moment as another process."""
    dist.is_initialized = lambda: False  # a forked process cannot use the group of a trainer in this one
    barrier.wait()
    try:
        with own_names():
            number, memory = prefix.get_shm_prefix([folder], [None], World.detect())
        barrier.wait()
        results.put(number)
        memory.cleanup()
    except Exception as error:
        barrier.abort()
        results.put(repr(error))


def test_data_sets_of_two_processes_that_begin_at_once_have_other_names(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    runs = [context.Process(target=register, args=(f"/folder{i}", barrier, results)) for i in range(2)]
    for run in runs:
        run.start()
    found = [results.get(timeout=60) for _ in runs]
    for run in runs:
        run.join()
    assert all(isinstance(number, int) for number in found), found
    assert found[0] != found[1]


def test_memory_to_which_another_rank_gives_a_size_later_is_waited_for(latent_sets, monkeypatch):
    """Where the other one had to wait for a processor between both, a run that went on ended with a ValueError."""
    placement = Placement(8, training=True)
    stream = {"name": local_set(path=str(latent_sets / "train"))}
    dataset = latents(placement, {}, streams=stream, resolution=16).loader.dataset
    state = dataset.state_dict(8, from_beginning=True)
    monkeypatch.setattr(memory, "BuiltinSharedMemory", SharedMemory)  # tests are inside of `own_names`
    name = "/" + prefix._get_path(dataset._shm_prefix_int, RESUME)
    file = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    timer = threading.Timer(0.5, os.ftruncate, (file, 4096))
    timer.start()
    try:
        dataset.load_state_dict(state)
        assert json.loads(bytes(dataset._resume_shm.buf).split(b"\0")[0]) == state
    finally:
        timer.join()
        os.close(file)
        _posixshmem.shm_unlink(name)
    assert memory.BuiltinSharedMemory is SharedMemory


def test_outside_names_are_streamings_own():
    before = prefix._each_prefix_int
    with own_names():
        first = next(prefix._each_prefix_int())
        assert first == next(prefix._each_prefix_int())
    with own_names():
        assert next(prefix._each_prefix_int()) != first
    assert prefix._each_prefix_int is before


def test_machines_of_a_run_have_other_names(monkeypatch):
    """Their locks would be the same files where they share the folder for temporary files."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 1 << 40)  # what the first rank tells the others
    found = []
    for machine in ("gpu-1", "gpu-2", "gpu-1"):
        name = SimpleNamespace(nodename=machine)
        monkeypatch.setattr("data.encoded.shared_names.uname", lambda name=name: name)
        with own_names():
            found.append(next(prefix._each_prefix_int()))
    assert found[0] == found[2] != found[1]


def test_a_cache_is_used_by_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    held = held_by_a_child(tmp_path / f".lock-{os.uname().nodename}")
    with held as child, pytest.raises(ValueError, match=f"is in use by another run .process {child} on"):
        lock_cache(str(tmp_path))
    lock_cache(str(tmp_path))
    lock_cache(str(tmp_path))
