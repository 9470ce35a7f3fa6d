"""Processes that do not meet at the start of a run."""

import importlib
import os

import pytest
import torch.distributed as dist

from data.system.errors import Outage
from recipes.engines import meeting

ENGINES = ("composer", "lightning")


@pytest.fixture
def second_of_two(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29571")


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_that_do_not_meet_end_in_one_line(engine, second_of_two, monkeypatch, small_recipe, tmp_path):
    def unreachable(*arguments, **keywords):
        raise dist.DistNetworkError("The client socket has timed out\nstack")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", unreachable)
    build = importlib.import_module(f"recipes.engines.{engine}.trainer").build_trainer
    with pytest.raises(Outage) as caught:
        build(small_recipe(tmp_path, f"training.engine={engine}"))
    assert str(caught.value) == (
        "launcher: rank 1 did not meet all 2 processes of the run at 127.0.0.1:29571 (MASTER_ADDR, MASTER_PORT): The "
        "client socket has timed out. See whether the others were started and what they say; if another job has left "
        "these variables, unset them"
    )


def test_a_long_wait_is_told(second_of_two, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(meeting, "say", lambda line: os.write(write, line.encode()))
    monkeypatch.setattr(meeting, "PATIENCE", 0.0)
    with meeting.meeting():
        line = os.read(read, 1000).decode()
    assert line.startswith("rank 1: waits up to 600 s for all 2 processes of the run (WORLD_SIZE) to meet at 127.0.0.1")


def test_a_process_that_is_alone_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="own"), meeting.meeting():
        raise RuntimeError("own")
