"""PowerSGD in runs: refusals, real runs on two and four ranks, and (in the same launches) Adam16 on shards."""

import re
from pathlib import Path

import pytest
import torch
from composer import Trainer
from torch.utils.data import DataLoader

from recipes.algorithms.powersgd.block_gradients import blocks_of
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.tensor_parallel.lever import TensorParallel
from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.composer.model import ComposerTask
from recipes.engines.composer.run import ComposerRun
from recipes.models.language.task import Language
from recipes.models.task import Task
from recipes.training.levers import Levers
from tests.ranks import launch
from tests.recipes.algorithms.residual import Residual
from tests.recipes.training.fake_run import FakeRun

HERE = Path(__file__).parent


def check(ranks, script, *folders):
    result = launch(ranks, HERE / script, *folders)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert result.stdout.count("all as it should be") == ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of the launch on two ranks, from one of whose checkpoints four go on."""
    folder = tmp_path_factory.mktemp("two")
    check(2, "powersgd_ranks.py", folder)
    return folder


def test_runs_and_shards_on_two_ranks(two):
    """Full rank is plain averaging, replicas stay equal, an infinity skips one batch, errors resume; Adam16 on shards
    of FSDP2; exponents are counted over ranks."""


def test_two_machines_of_two_devices(two, tmp_path):
    """The compressor by itself; then the same between machines that shard, overlapped or not; errors move to another
    number of machines, and a run to another number of ranks."""
    check(4, "powersgd_shards_ranks.py", tmp_path, two)


def test_one_process_has_nothing_to_average():
    task = Residual()
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataLoader([{"words": torch.zeros(3, dtype=torch.int64)}]),
        max_duration="1ba",
        optimizers=torch.optim.SGD(task.parameters(), lr=0.1),
        algorithms=as_algorithms(Levers([PowerSGD(task, rank=2, clip=4.0)]), ComposerRun(task)),
        device="cpu",
        progress_bar=False,
    )
    with pytest.raises(ValueError, match="only one replica .*, and clip by training.grad_clip=4"):
        trainer.fit()


def test_one_tensor_parallel_group_has_nothing_to_average(one_rank):
    """It said to use training.fsdp, with which the same devices are one replica, too. Dry runs say the same."""
    task = Language(layers=1, width=8, heads=2, positions=4, vocabulary=8)
    TensorParallel(task, devices=1, replicas=1, sharded=False, sequence=False).shard(FakeRun(task))
    with pytest.raises(ValueError, match="^powersgd: there is only one replica"):
        PowerSGD(task, rank=2).begin(FakeRun(task))


def test_what_it_averages_between_are_replicas(capsys):
    """Two processes of one machine are no machines."""
    lever = PowerSGD(Residual(), rank=2)
    lever.blocks, lever.machines, lever.compressor = blocks_of(lever.task), 2, LowRank(2, **lever.formats)
    lever._log_traffic()
    assert re.search(r"powersgd: \d+ matrices in \d+ blocks, 2 replicas, [\d,]+ bytes sent", capsys.readouterr().out)


@pytest.mark.parametrize("share", [0.25, 1.5, None])
def test_gradients_are_clipped_to_a_norm_and_shorter_ones_stay(one_rank, monkeypatch, share):
    """As `training.grad_clip` clips those that are averaged whole. Full rank on a 32-bit wire loses nothing."""
    task = Residual()
    for number, p in enumerate(task.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    given = [p.grad.clone() for p in task.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in given]).norm().item()
    clip = None if share is None else share * norm
    lever = PowerSGD(task, rank=100, wire="32-bit", buffer="32-bit", clip=clip)
    monkeypatch.setattr(lever, "_check_processes", lambda run: None)  # one process, whose gradients are the average
    run = FakeRun(task)
    monkeypatch.setattr(task, "register_comm_hook", lambda *_: None, raising=False)
    lever.begin(run)
    lever.average_gradients(run)
    ((_, figures),) = run.logged
    assert figures["powersgd/norm"] == pytest.approx(norm, rel=1e-5) and figures["powersgd/skipped"] == 0
    for p, gradient in zip(task.parameters(), given, strict=True):
        torch.testing.assert_close(p.grad, min(1.0, share or 1.0) * gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "arguments", [{"rank": 0}, {"rank": 2, "p_scale": 0.0}, {"rank": 2, "q_scale": -1.0}, {"rank": 2, "clip": 0.0}]
)
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="rank must be at least 1, scales and clip above 0"):
        PowerSGD(Residual(), **arguments)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"precision": "amp_fp16"}, "gradients are scaled under training.precision amp_fp16"),
        ({"devices": 2}, "rank 3 is not divisible by the 2 devices of a machine"),
        ({"sharded": False}, "overlap needs training.fsdp"),
    ],
)
def test_runs_that_it_does_not_fit_are_refused(run, message):
    lever = PowerSGD(Residual(), rank=3, overlap=True)
    lever.check_groups(devices=3, sharded=True, precision="fp32")
    with pytest.raises(ValueError, match=message):
        lever.check_groups(**{"devices": 3, "sharded": True, "precision": "fp32"} | run)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Task does not say which of its modules are blocks"):
        PowerSGD(Task(), rank=1)
    empty = Residual()
    empty.layers = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
    with pytest.raises(ValueError, match="the 1 blocks of Residual have no trained matrices"):
        PowerSGD(empty, rank=1)


def test_a_checkpoint_of_another_model_is_refused():
    algorithm = PowerSGD(Residual(), rank=2)
    with pytest.raises(ValueError, match=r"errors are of other matrices: layers.0.branch.1.weight"):
        algorithm.load_state_dict({"errors": {}, "skipped": 0, "rank": 2, "seed": 0})


def test_a_resumed_run_goes_on_counting_what_it_skipped():
    algorithm = PowerSGD(Residual(), rank=2)
    errors = {matrix.name: torch.zeros(matrix.parameter.shape) for block in blocks_of(Residual()) for matrix in block}
    algorithm.load_state_dict({"errors": errors, "skipped": 3, "rank": 2, "seed": 0})
    assert algorithm.skipped == 3
