"""Sharded checkpoints in which a file is another checkpoint's."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from recipes.engines.checkpoints import batch_marks
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint
from recipes.engines.checkpoints.same_model import saved_at
from recipes.engines.checkpoints.save_planner import save_sharded
from recipes.engines.checkpoints.sharded_files import Sharded
from tests.ranks import launch

# Both ranks have a half of each of two checkpoints.
RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from recipes.engines.checkpoints.save_planner import save_sharded

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for batch in (1, 2):
    weight = distribute_tensor(torch.full((4,), float(batch)), mesh, [Shard(0)])
    save_sharded({"weights": {"w": weight}}, Path(sys.argv[1], f"ep0-ba{batch}"), batch)
"""


def test_a_file_of_a_rank_of_another_batch_is_refused(tmp_path):
    """It has the size and the places of the right one: half of the weights were of another batch, without a word."""
    (tmp_path / "ranks.py").write_text(RANKS)
    done = launch(2, tmp_path / "ranks.py", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (tmp_path / f"ep0-ba{batch}" for batch in (1, 2))
    assert Sharded.open(two).values()["weights.w"].tolist() == [2.0] * 4
    found = {"weights": {"w": torch.zeros(4)}}
    dcp.load(found, checkpoint_id=two, no_dist=True)  # as PyTorch reads it
    assert found["weights"]["w"].tolist() == [2.0] * 4
    part = two / "__1_0.distcp"
    assert part.stat().st_size == (one / part.name).stat().st_size
    part.write_bytes((one / part.name).read_bytes())
    said = f"^{two}: files of two checkpoints are mixed: __0_0.distcp is of batch 2 and __1_0.distcp is of batch 1"
    for read in (Sharded.open, lambda folder: saved_at(folder, "lightning")):
        with pytest.raises(DamagedCheckpoint, match=said):
            read(two)
    part.write_bytes(part.read_bytes()[:-16])
    with pytest.raises(DamagedCheckpoint, match="__1_0.distcp is of no batch"):
        Sharded.open(two)
    rest = two / "__0_0.distcp"
    rest.write_bytes(rest.read_bytes()[:-16])  # both as an earlier version wrote them
    Sharded.open(two)


def test_a_checkpoint_of_one_process_has_a_mark(tmp_path):
    save_sharded({"weights": torch.ones(2)}, tmp_path, batch=7)
    assert (tmp_path / "__0_0.distcp").read_bytes().endswith(b"ba00000000000007")


@pytest.mark.parametrize("wrong", range(5))
def test_the_first_of_many_ranks_looks_at_all_files(tmp_path, monkeypatch, wrong):
    """A part of the files would be too few: where a run goes on, no other rank looks."""
    names = [f"__{number}_0.distcp" for number in range(5)]
    metadata = SimpleNamespace(storage_data={name: SimpleNamespace(relative_path=name) for name in names})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(b"ba%014d" % (1 if number == wrong else 2))
    with pytest.raises(DamagedCheckpoint, match=f"{names[wrong]} is of batch 1"):
        batch_marks.check_one_batch(tmp_path, metadata)
