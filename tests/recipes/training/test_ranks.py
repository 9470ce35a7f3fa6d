"""What ranks tell each other: alone, and in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.training import ranks
from tests.callbacks import grid_ranks
from tests.recipes.training import waiting_ranks

ROOT = Path(__file__).resolve().parents[3]
TWO = """
import sys
import torch
import torch.distributed as dist

from data.process_groups import leave
from recipes.training import ranks

number = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=number, world_size=2)
assert (ranks.rank(), ranks.world_size(), ranks.is_first_rank()) == (number, 2, number == 0)
for operation, wanted in {"SUM": 5.0, "MIN": 2.0, "MAX": 3.0}.items():
    tensor = torch.tensor([2.0 + number])
    ranks.all_reduce(tensor, operation)
    assert tensor.item() == wanted, operation
assert ranks.smallest(10 - number, torch.device("cpu")) == 9
assert ranks.from_first_rank({"rank": number}) == {"rank": 0}
leave()
"""


def test_one_process_needs_no_process_group():
    assert (ranks.rank(), ranks.world_size(), ranks.is_first_rank()) == (0, 1, True)
    tensor = torch.tensor([3.0])
    ranks.all_reduce(tensor)
    assert tensor.item() == 3.0
    assert ranks.smallest(7, torch.device("cpu")) == 7
    assert ranks.from_first_rank("value") == "value"


LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:43194"


@pytest.mark.parametrize(
    "line",
    [
        LOST,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "remote process exited or there was a network error",
    ],
)
def test_a_rank_that_loses_the_connection_says_so_in_a_line(monkeypatch, capsys, line):
    with pytest.raises(RuntimeError, match="^in"), ranks.says_that_another_ended():
        raise RuntimeError(f"in:\n{line}")  # there is no other rank
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="shapes"), ranks.says_that_another_ended():
        raise RuntimeError("shapes differ")
    with pytest.raises(SystemExit, match="1"), ranks.says_that_another_ended():
        raise RuntimeError(f"in:\n{line}\nLast error:")
    said = "error: rank 0: the connection to another rank is lost; if that one has ended, see what it says"
    assert capsys.readouterr().err == f"{said} ({line})\n"


def test_two_processes(tmp_path):
    command = [sys.executable, "-c", TWO]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.parametrize("check", [*waiting_ranks.CHECKS, *grid_ranks.CHECKS])
def test_ranks_that_wait_or_share(two_ranks, check):
    two_ranks(check)
