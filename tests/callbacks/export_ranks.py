"""Run on two ranks by `lever_ranks`, and on one by test_export.py: exports of a model that is divided over ranks."""

import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from callbacks import divided_weights
from callbacks.export import Export
from data.loading import Loading
from recipes.algorithms.averaging.average import Average
from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.sharding.shard import shard
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.task import Task
from recipes.training.ranks import from_first_rank, is_first_rank
from tests.disks import small_files
from tests.recipes.training.fake_run import FakeRun

EXPORTS = "exports of a divided model"


class Ema:
    """What an export takes of ScheduledEMA. The averages are the weights plus one."""

    decay, every, begun, running = 0.99, 5, 3, True

    def __init__(self, task):
        self.average = Average(task)
        for tensor in self.average.shadow:
            tensor.add_(1)

    @contextmanager
    def applied(self):
        self.average.put_in()
        yield True
        self.average.take_out()


def new_task() -> Autoregressive:
    torch.manual_seed(0)
    task = Autoregressive(
        layers=2, width=10, heads=1, text_positions=5, text_vocabulary=11, side=4, codes=8, kernel=3
    )  # fmt: skip
    for parameter in task.parameters():
        parameter.data += torch.randn_like(parameter)
    return task


def new_export(task: Autoregressive, output: Path, averages: bool) -> Export:
    return Export(task, "run", str(output), Loading(loader=None), meta_task, Ema(task) if averages else None, None)


def meta_task() -> Autoregressive:
    with torch.device("meta"):
        return new_task()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_exports(folder: Path) -> None:
    """Written tensor by tensor, gathered, and of a model that is not divided: the same bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for averages in (False, True):
        whole, name = new_task(), f"average {averages}"
        if is_first_rank():
            with mock.patch("recipes.training.ranks.world_size", return_value=1):
                new_export(whole, folder / f"whole {name}", averages).end(FakeRun(whole).at(3))
        divided = new_task()
        recompute(divided.blocks())  # whose names in the model are others
        shard(divided, mesh, by_block=True)
        before = {name: p.to_local().clone() for name, p in divided.named_parameters()}
        batch = {"text": torch.zeros(1, 5, dtype=torch.int64), "image": torch.zeros(1, 16, dtype=torch.int64)}
        kinds = {"by piece": ("network", 300), "at once": ("network", 2**20), "gathered": (None, 0)}
        for kind, (exported, piece) in kinds.items():
            divided.evaluate(batch)  # after which its parameters are whole on each rank
            divided.exported = exported
            with mock.patch.object(divided_weights, "PIECE", piece), most_held() as held:
                new_export(divided, folder / f"{kind} {name}", averages).end(FakeRun(divided).at(3))
            if kind == "by piece" and dist.get_world_size() > 1:
                sizes = [p.numel() * p.element_size() for p in divided.parameters()]
                assert 0 < max(held) <= 300 + max(sizes) < sum(sizes) / 4, (max(held), max(sizes), sum(sizes))
        assert all(torch.equal(p.to_local(), before[name]) for name, p in divided.named_parameters())
        if is_first_rank():
            known = contents(folder / f"whole {name}" / "export")
            assert len(known) == (6 if averages else 4), known.keys()
            for kind in kinds:
                assert contents(folder / f"{kind} {name}" / "export") == known, (kind, averages)
            raw = load_file(folder / f"by piece {name}" / "export" / "transformer" / "model.safetensors")
            assert all(torch.equal(raw[name], tensor) for name, tensor in new_task().network.state_dict().items())
            new_task().load_export(folder / f"by piece {name}" / "export")
    check_full_disk(folder / "full", divided)
    check_first_rank_fails(folder / "fails", divided)


@contextmanager
def most_held():
    """Yields a list that gets, at each tensor that is gathered, the bytes of all gathered ones that are in memory."""
    held, alive, gather = [], {}, divided_weights.whole

    def whole(tensor):
        found = gather(tensor)
        storage = found.untyped_storage()
        alive[storage.data_ptr()] = weakref.ref(found), storage.nbytes()
        held.append(sum(size for reference, size in alive.values() if reference() is not None))
        return found

    with mock.patch.object(divided_weights, "whole", whole):
        yield held


def check_full_disk(folder: Path, task: Autoregressive) -> None:
    """All ranks end with one line, and the export before stays."""
    task.exported = "network"
    export = new_export(task, folder, averages=True)
    export.end(FakeRun(task).at(3))
    before = from_first_rank(contents(folder / "export"))
    room = max(len(data) for data in before.values()) // 2  # the header and some tensors
    refused = pytest.raises(OSError if is_first_rank() else ValueError)
    with small_files(room), mock.patch.object(divided_weights, "PIECE", 300), refused as error:
        export.end(FakeRun(task).at(4))
    assert "\n" not in str(error.value) and str(error.value).endswith(f"File too large: '{folder / 'export'}'")
    assert from_first_rank(contents(folder / "export")) == before and [*folder.iterdir()] == [folder / "export"]


def check_first_rank_fails(folder: Path, task: Autoregressive) -> None:
    """The weights do not fit into the model that the first rank alone makes for them: no rank waits for it."""
    task.exported = None
    export = Export(task, "run", str(folder), Loading(loader=None), Task, None, None)
    with pytest.raises((RuntimeError, ValueError), match="Unexpected key"):
        export.end(FakeRun(task).at(3))
    assert not folder.exists()


CHECKS = {EXPORTS: check_exports}
