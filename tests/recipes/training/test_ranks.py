"""What ranks tell each other: alone, and on two ranks."""

import pytest
import torch

from recipes.training import ranks
from tests.callbacks import export_ranks, grid_ranks
from tests.recipes.training import waiting_ranks


def test_one_process_needs_no_process_group():
    assert (ranks.rank(), ranks.world_size(), ranks.is_first_rank()) == (0, 1, True)
    tensor = torch.tensor([3.0])
    ranks.all_reduce(tensor)
    assert tensor.item() == 3.0
    assert ranks.smallest(7, torch.device("cpu")) == 7
    assert ranks.from_first_rank("value") == "value"


@pytest.mark.parametrize("backend, devices", [("nccl", [3]), ("gloo", None)])
def test_ranks_wait_for_each_other_on_their_own_gpus(monkeypatch, backend, devices):
    """NCCL would take the GPU of the rank's number. A run's first message is a barrier."""
    given = []
    monkeypatch.setattr(ranks, "world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids=None: given.append(device_ids))
    ranks.wait()
    assert given == [devices]


LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:43194"


@pytest.mark.parametrize(
    "line",
    [
        LOST,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "remote process exited or there was a network error",
        "failed to recv, got 0 bytes",  # of the store, when the first rank has ended; torch 2.11 goes on
        "Broken pipe",
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


@pytest.mark.parametrize("check", [*waiting_ranks.CHECKS, *grid_ranks.CHECKS, *export_ranks.CHECKS])
def test_ranks_that_wait_or_share(two_ranks, check):
    two_ranks(check)
