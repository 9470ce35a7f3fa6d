"""Batches that are not finite: what is skipped, when a run ends, and what it then says."""

import copy
import json
import math
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.resilience.guard import REPORT, Guard, block_norms
from recipes.algorithms.sixteen_bit.fp16_weights import store
from recipes.training import stop
from recipes.training.finite import has_finite_weights, is_worth_keeping, largest_magnitude
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from recipes.training.transfer import HostCopy
from tests.disks import small_files
from tests.recipes.algorithms.resilience import guard_ranks
from tests.recipes.training.fake_run import FakeRun


def step(run, levers, batch, value=1.0, loss=None):
    """One batch whose gradients are a value, and its loss, too, unless it is given."""
    levers.call("batch_start", run)
    run.batch = {"seed": torch.tensor([3, 5])}
    for parameter in run.task.parameters():
        parameter.grad = torch.full_like(parameter, value)
    levers.finish_gradients(run)
    run.optimizer.step()
    run.loss = value if loss is None else loss
    run.at(batch)
    levers.call("step_end", run)


def new_run(tmp_path, limit=3, precision="fp32", fused=True):
    """`fused` as in the recipes: such an optimizer skips updates by itself."""
    task = nn.Linear(2, 2)
    run = FakeRun(task, precision=precision, optimizer=torch.optim.AdamW(task.parameters(), lr=0.1, fused=fused))
    return run, Levers([ClipByNorm(1.0)], first=[Guard(limit, str(tmp_path), lambda seeds: {5: "cat"})])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_moves_nothing(tmp_path, value, fused):
    run, levers = new_run(tmp_path, fused=fused)
    step(run, levers, 1)
    before = [p.detach().clone() for p in run.task.parameters()]
    moments = [run.optimizer.state[p]["exp_avg"].clone() for p in run.task.parameters()]
    step(run, levers, 2, value)
    assert run.nonfinite == 1 and not is_worth_keeping(run)
    assert all(torch.equal(one, other) for one, other in zip(before, run.task.parameters(), strict=True))
    assert all(
        torch.equal(m, run.optimizer.state[p]["exp_avg"]) for m, p in zip(moments, run.task.parameters(), strict=True)
    )
    assert all(run.optimizer.state[p]["step"] == 1 for p in run.task.parameters())
    step(run, levers, 3)
    assert run.nonfinite == 0 and is_worth_keeping(run)
    assert not torch.equal(before[0], run.task.weight)
    assert (2, {"nonfinite/in_a_row": 1, "nonfinite/skipped": 1}) in run.logged


class Shrinks(torch.optim.AdamW):
    """Adds an update of its own to that of a fused optimizer."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


class Wraps(torch.optim.Optimizer):
    """Hands over to a fused optimizer what it does not have."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.state = inner.state

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("kind", [Shrinks, Wraps])
def test_a_batch_that_is_not_finite_moves_nothing_in_steps_around_a_fused_one(tmp_path, kind):
    """The fused step alone would know that the update is to be skipped, or would not be told."""
    task = nn.Linear(2, 2)
    parameters = list(task.parameters())
    optimizer = (
        Shrinks(parameters, lr=0.1, fused=True)
        if kind is Shrinks
        else Wraps(torch.optim.AdamW(parameters, lr=0.1, fused=True))
    )
    run, levers = FakeRun(task, optimizer=optimizer), Levers([], first=[Guard(3, str(tmp_path))])
    step(run, levers, 1)
    before = [p.detach().clone() for p in parameters]
    step(run, levers, 2, math.nan)
    assert run.nonfinite == 1
    assert all(torch.equal(one, other) for one, other in zip(before, parameters, strict=True))


class Skips(Lever):
    """Skips all updates, as powersgd and resblock_grad_scaling do, whose guard sees no gradient any more."""

    def average_gradients(self, run):
        run.skip_update()


@pytest.mark.parametrize(("scaling", "ends"), [(None, True), (False, True), (True, False)])
def test_batches_that_another_lever_skips_count_unless_a_scale_will_be_smaller(tmp_path, scaling, ends):
    run, _ = new_run(tmp_path)
    scaling = None if scaling is None else SimpleNamespace(lowers=scaling)
    levers = Levers([Skips(), ClipByNorm(1.0)], first=[Guard(3, str(tmp_path), scaling=scaling)])
    for batch in (1, 2):
        step(run, levers, batch)
    assert run.nonfinite == 2 * ends
    with pytest.raises(ValueError, match="3 batches in a row were not finite") if ends else nullcontext():
        step(run, levers, 3)


def test_updates_are_those_without_a_guard(tmp_path):
    torch.manual_seed(0)
    run, levers = new_run(tmp_path)
    alone = copy.deepcopy(run.task)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, fused=True)
    for batch in range(1, 6):
        step(run, levers, batch, value=1.0 / batch)
        for parameter in alone.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 / batch)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    for parameter, other in zip(run.task.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_the_host_reads_whether_gradients_are_finite_after_the_update(tmp_path, monkeypatch):
    """Then a GPU has the update to do while the host waits, unless this batch may be the last."""
    reads = []
    monkeypatch.setattr(HostCopy, "tolist", lambda copy: reads.append(copy) or copy._numbers.tolist())
    run, levers = new_run(tmp_path, limit=3)
    for batch, value, early in [(1, 1.0, 0), (2, math.nan, 0), (3, math.nan, 0), (4, 1.0, 1), (5, 1.0, 0)]:
        levers.call("batch_start", run)
        for parameter in run.task.parameters():
            parameter.grad = torch.full_like(parameter, value)
        levers.finish_gradients(run)
        assert len(reads) == early
        before = run.task.weight.detach().clone()
        run.optimizer.step()
        assert torch.equal(run.task.weight, before) == math.isnan(value)  # what the last one skipped skips no further
        run.loss = value
        levers.call("step_end", run.at(batch))
        assert len(reads) == 1
        reads.clear()


def test_one_bad_value_is_enough(tmp_path):
    run, levers = new_run(tmp_path, fused=False)
    levers.call("batch_start", run)
    run.task.weight.grad, run.task.bias.grad = torch.ones(2, 2), torch.ones(2)
    run.task.weight.grad[1, 0] = math.nan
    levers.finish_gradients(run)
    assert run.task.bias.grad is None  # and clipping spread nothing


def test_too_many_in_a_row_end_the_run_with_a_report(tmp_path):
    run, levers = new_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    good = tmp_path / "checkpoints" / "ep0-ba1.ckpt"
    good.touch()
    (tmp_path / "checkpoints" / "latest").symlink_to(good.name)
    for batch in (1, 2):
        step(run, levers, batch, math.nan)
    step(run, levers, 3)  # not in a row
    step(run, levers, 4, math.nan)
    step(run, levers, 5, math.nan)
    message = rf"3 batches in a row were not finite, since batch 4 \(loss nan\); the last good checkpoint is {good}"
    with pytest.raises(ValueError, match=message) as error:
        step(run, levers, 6, math.nan)
    assert "\n" not in str(error.value)
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["in_a_row"] == 3 and report["since_batch"] == 4 and report["last_good_checkpoint"] == str(good)
    assert report["seeds_of_the_last_batch_on_rank_0"] == [3, 5]
    assert report["keys_of_the_last_batch_on_rank_0"] == [None, "cat"]
    (block,) = report["blocks"]
    weights = torch.nn.utils.get_total_norm([p.detach() for p in run.task.parameters()])
    assert block["gradients"] == "nan" and block["weights"] == pytest.approx(weights.item())


def test_norms_of_gradients_stored_in_16_bits_are_without_their_factors():
    task = nn.Linear(2, 2)
    store([task.weight], torch.tensor(2.0**15))
    task.weight.grad = torch.full((2, 2), 2.0**15, dtype=torch.float16)  # whose norm is no 16-bit number
    task.bias.grad = torch.tensor([math.sqrt(5.0), 0.0])
    (block,) = block_norms(task)
    assert block["gradients"] == pytest.approx(3.0)


def test_norms_are_those_of_each_block_and_of_the_rest():
    task = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    task.blocks = lambda: [task[1]]
    task[1].weight.grad = torch.full((2, 2), 2.0)
    norms = [torch.nn.utils.get_total_norm([p.detach() for p in layer.parameters()]).item() for layer in task]
    assert block_norms(task) == [
        {"block": "1", "weights": pytest.approx(norms[1]), "gradients": 4.0},
        {"block": "the rest", "weights": pytest.approx(norms[0]), "gradients": 0.0},
    ]


def test_a_full_disk_does_not_hide_why_the_run_ends(tmp_path, capsys):
    run, levers = new_run(tmp_path, limit=1)
    with small_files(10), pytest.raises(ValueError, match="1 batch was not finite"):
        step(run, levers, 1, math.nan)
    assert f"{tmp_path / REPORT} could not be written (File too large)" in capsys.readouterr().out


def test_a_run_that_ends_so_is_an_error(tmp_path):
    run, levers = new_run(tmp_path)
    step(run, levers, 9)
    step(run, levers, 10, math.nan)
    run.batch = {"seed": torch.tensor([7])}  # of the validation with which each run ends
    with pytest.raises(ValueError, match="1 batch was not finite, since batch 10 .*checkpoint is none"):
        levers.call("end", run)
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["last_good_checkpoint"] is None and report["seeds_of_the_last_batch_on_rank_0"] == [3, 5]
    assert [block["gradients"] for block in report["blocks"]] == ["nan"]


def test_under_fp16_gradients_are_left_to_the_scaler(tmp_path):
    run, levers = new_run(tmp_path, precision="amp_fp16")
    run.scale = 2.0
    levers.call("batch_start", run)
    for parameter in run.task.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    levers.finish_gradients(run)
    assert run.task.bias.grad is not None
    run.loss = 1.0
    levers.call("step_end", run.at(1))
    assert run.nonfinite == 0
    for row, loss in enumerate((math.nan, math.inf), 1):
        levers.call("batch_start", run)
        run.loss = loss
        levers.call("step_end", run.at(1 + row))
        assert run.nonfinite == row


def test_under_fp16_gradients_that_no_scale_makes_finite_end_the_run(tmp_path):
    """After as many batches as the scaler needs to come to a scale of 1, and the limit."""
    run, levers = new_run(tmp_path, limit=3, precision="amp_fp16")
    run.scale = 2.0**16
    with pytest.raises(ValueError, match="3 batches in a row were not finite, since batch 17 .loss 0.5"):
        for batch in range(1, 100):
            levers.call("batch_start", run)
            for parameter in run.task.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
            levers.finish_gradients(run)
            run.loss, run.scale = 0.5, run.scale / 2
            levers.call("step_end", run.at(batch))
    assert run.clock.batch == 19


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_skips_the_update_by_itself(tmp_path):
    task = nn.Linear(64, 64, device="cuda")
    run = FakeRun(task, optimizer=torch.optim.AdamW(task.parameters(), lr=0.1, fused=True))
    run.device = torch.device("cuda")
    levers = Levers([ClipByNorm(1.0)], first=[Guard(3, str(tmp_path))])
    step(run, levers, 1)
    before = task.weight.detach().clone()
    step(run, levers, 2, math.nan)
    assert torch.equal(task.weight, before) and run.nonfinite == 1
    step(run, levers, 3)
    assert task.weight.isfinite().all() and not torch.equal(task.weight, before)
    assert run.optimizer.state[task.weight]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights(dtype, value):
    run = FakeRun(nn.Linear(70, 70).to(dtype))
    assert has_finite_weights(run)
    with torch.no_grad():
        run.task.weight[31, 7] = value
    assert not has_finite_weights(run) and not is_worth_keeping(run)


def test_magnitudes():
    assert largest_magnitude([torch.tensor([1.0, -3.0]), torch.tensor([2]), torch.empty(0)]) == 3
    assert largest_magnitude([]) == 0
    assert largest_magnitude([torch.full((5,), 3e38)]).isfinite()  # whose L2 norm is not


def test_the_line_says_whether_the_update_was_skipped(tmp_path, caplog):
    run, levers = new_run(tmp_path)
    for batch, gradient, loss, skipped in ((1, math.nan, 1.0, True), (2, 1.0, 1.0, False), (3, 1.0, math.nan, False)):
        before = run.task.weight.detach().clone()
        step(run, levers, batch, gradient, loss)
        assert torch.equal(run.task.weight, before) == skipped
    first, second = caplog.messages
    assert first == "batch 1: loss 1.0, gradients not finite; its update is skipped"
    assert second == "batch 3: loss nan is not finite"


def test_a_signal_is_seen_at_the_next_batch(tmp_path, monkeypatch):
    run, levers = new_run(tmp_path)
    monkeypatch.setattr(stop, "_in_batches", False)
    step(run, levers, 1)
    assert not run.stopping and stop._in_batches  # from now on it does not end the process
    monkeypatch.setattr(stop, "_caught", "SIGTERM")
    step(run, levers, 2)
    assert run.stopping


def test_an_overdue_checkpoint_is_asked_for_until_it_is_saved(tmp_path, monkeypatch):
    run, levers = new_run(tmp_path)
    for batch, save_from, overdue in ((1, math.inf, False), (2, time.monotonic() - 1, True), (3, math.inf, False)):
        run.save_from = save_from
        step(run, levers, batch)
        assert run.overdue == overdue and not run.stopping
    run.save_from = 0.0
    monkeypatch.setattr(stop, "_caught", "SIGTERM")
    step(run, levers, 4)
    assert run.stopping  # which saves one as well


@pytest.mark.slow
@pytest.mark.parametrize("check", guard_ranks.CHECKS)
def test_two_ranks(two_ranks, check):
    two_ranks(check)
