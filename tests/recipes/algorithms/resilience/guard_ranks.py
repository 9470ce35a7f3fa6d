"""Run on two ranks by `lever_ranks`: ranks agree on what one of them sees, and on checkpoints."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.algorithms.resilience import guard as guard_module
from recipes.algorithms.resilience.guard import Guard, block_norms
from recipes.engines.checkpoints.files import whole
from recipes.training import stop
from recipes.training.finite import has_finite_weights
from recipes.training.levers import Levers
from tests.recipes.training.fake_run import FakeRun


def one_ranks_gradients(folder):
    """A NaN on the second rank only: neither moves."""
    torch.manual_seed(0)
    task = nn.Linear(2, 2)
    run = FakeRun(task, optimizer=torch.optim.AdamW(task.parameters()))
    levers = Levers([], first=[Guard(3, str(folder))])
    for batch, value in enumerate((1.0, float("nan") if dist.get_rank() else 1.0), 1):
        levers.call("batch_start", run)
        for parameter in task.parameters():
            parameter.grad = torch.full_like(parameter, value)
        levers.finish_gradients(run)
        assert (task.bias.grad is None) == (batch == 2)
        run.loss = 1.0
        levers.call("step_end", run.at(batch))
        assert run.nonfinite == batch - 1 and not run.stopping


def one_ranks_gradient_of_shards(folder):
    """A NaN in the second rank's shard: the fused optimizer skips the update on both, and the host reads that later."""
    torch.manual_seed(0)
    task = nn.Linear(4, 4)
    fully_shard(task, mesh=init_device_mesh("cpu", (2,)))
    run = FakeRun(task, optimizer=torch.optim.AdamW(task.parameters(), lr=0.1, fused=True))
    levers = Levers([], first=[Guard(3, str(folder))])
    steps = []
    for batch, bad in enumerate((False, True, False), 1):
        levers.call("batch_start", run)
        for parameter in task.parameters():
            parameter.grad = torch.ones_like(parameter)
        if bad and dist.get_rank():
            task.weight.grad.to_local()[1, 2] = float("nan")
        levers.finish_gradients(run)
        assert task.bias.grad is not None  # nothing is read yet
        before = [parameter.full_tensor().clone() for parameter in task.parameters()]
        run.optimizer.step()
        same = [torch.equal(p.full_tensor(), old) for p, old in zip(task.parameters(), before, strict=True)]
        assert same == [bad, bad]
        run.loss = 1.0
        levers.call("step_end", run.at(batch))
        assert run.nonfinite == bad and run.optimizer.found_inf is None
        steps.append({int(run.optimizer.state[p]["step"]) for p in task.parameters()})
    assert steps == [{1}, {1}, {2}]  # what was skipped does not count in the bias correction


def one_ranks_signal(folder):
    """A signal to the second rank only: both stop after the same batch."""
    task = nn.Linear(2, 2)
    run = FakeRun(task, optimizer=torch.optim.AdamW(task.parameters()))
    levers = Levers([], first=[Guard(3, str(folder))])
    for batch in (1, 2, 3):
        if batch == 2 and dist.get_rank():
            stop._caught = "SIGTERM"
        levers.call("batch_start", run)
        levers.finish_gradients(run)
        assert run.stopping == (batch >= 2)
    stop._caught = None


def one_ranks_clock(folder):
    """A checkpoint is overdue by the second rank's clock only: both save one after the same batch."""
    task = nn.Linear(2, 2)
    run = FakeRun(task, optimizer=torch.optim.AdamW(task.parameters()))
    levers = Levers([], first=[Guard(3, str(folder))])
    for batch in (1, 2, 3):
        run.save_from = 0.0 if batch == 2 and dist.get_rank() else float("inf")
        levers.call("batch_start", run)
        levers.finish_gradients(run)
        assert run.overdue == (batch == 2) and not run.stopping


def one_ranks_shard(folder):
    """A weight that is not finite in the second rank's shard is known to both, and norms are of whole blocks."""
    torch.manual_seed(0)
    task = nn.Linear(4, 4)
    norm = sum(p.detach().square().sum() for p in task.parameters()).sqrt().item()
    fully_shard(task, mesh=init_device_mesh("cpu", (2,)))
    run = FakeRun(task)
    assert has_finite_weights(run)
    assert abs(block_norms(task)[0]["weights"] - norm) < 1e-6
    with torch.no_grad():
        if dist.get_rank():
            task.weight.to_local()[0] = float("inf")
    assert not has_finite_weights(run)
    assert block_norms(task)[0]["weights"] == "inf"


def a_folder_of_both(folder):
    """It has its name when both have written, on both ranks."""
    path = folder / "checkpoints" / "ep0-ba1"
    for content in ("first", "second"):
        with whole(path) as partial:
            partial.mkdir(exist_ok=True)
            time.sleep(0.2 * dist.get_rank())  # the first one waits for the other
            (partial / str(dist.get_rank())).write_text(content)
        assert [(path / name).read_text() for name in "01"] == [content] * 2
    assert [p.name for p in path.parent.iterdir()] == ["ep0-ba1"]


def a_report(folder):
    """Each rank ends when it is written: a launcher ends the first one when another has ended."""
    run, guard = FakeRun(), Guard(1, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module, "write_json", lambda *_, **__: time.sleep(0.3) or (folder / "written").touch())
        guard.batch_start(run)
        run.loss = float("nan")
        with pytest.raises(ValueError, match="1 batch was not finite"):
            guard.step_end(run.at(1))
    assert (folder / "written").exists()


CHECKS = {
    "guard: a report": a_report,
    "guard: gradients of one rank": one_ranks_gradients,
    "guard: a gradient of one rank's shard": one_ranks_gradient_of_shards,
    "guard: a signal to one rank": one_ranks_signal,
    "guard: the clock of one rank": one_ranks_clock,
    "guard: a shard of one rank": one_ranks_shard,
    "guard: a folder of both ranks": a_folder_of_both,
}
