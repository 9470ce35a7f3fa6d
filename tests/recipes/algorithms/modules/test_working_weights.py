"""16-bit copies of weights that are kept over the microbatches of a batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.modules import working_weights
from recipes.algorithms.modules.working_weights import WorkingWeights
from recipes.models.task import Task
from recipes.training.callback import Callback
from tests.recipes.training.fake_run import FakeRun, train


class AutocastRun(FakeRun):
    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16)


class Layers(Task):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    def blocks(self):
        return [self.layers[0], self.layers[2]]

    def forward(self, batch):
        return {"total": self.layers(batch["x"]).float().square().mean()}


class Casts(TorchDispatchMode):
    """How often a tensor of the shape of a weight became 16-bit."""

    def __init__(self, *shapes):
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and y.dtype == torch.bfloat16 and tuple(y.shape) in self.shapes:
            self.count += 1
        return y


def trained(task, levers, callbacks=()):
    run = AutocastRun(task, duration="4ba", precision="amp_bf16")
    torch.manual_seed(1)
    data = [{"x": torch.randn(9, 6)} for _ in range(2)]
    with Casts((5, 6), (4, 5)) as casts:
        train(run, data, levers=levers, callbacks=callbacks, microbatch=3)
    return dict(task.named_parameters()), casts.count


class LooksFirst(Callback):
    """As a callback that counts FLOPs: calls the task without gradients before the first microbatch."""

    def before_forward(self, run):
        if run.pass_number == 0:
            with torch.no_grad(), run.autocast():
                run.task(run.batch)


@pytest.mark.parametrize("callbacks", [(), (LooksFirst(),)])
def test_weights_are_cast_once_per_batch_and_nothing_else_changes(callbacks):
    torch.manual_seed(0)
    task = Layers()
    plain = copy.deepcopy(task)
    own, casts = trained(task, [WorkingWeights(task)], callbacks)
    theirs, more = trained(plain, [])
    assert more == 4 * 3 * 2 and casts == 4 * 2 * (1 + len(callbacks))
    for name, parameter in own.items():
        assert torch.equal(parameter, theirs[name]), name
    assert torch.is_autocast_cache_enabled() and torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize(
    ("precision", "reason"), [("fp32", "the run is in fp32"), ("amp_bf16", "FSDP gathers the weights")]
)
def test_where_the_model_is_sharded(precision, reason, monkeypatch, capsys):
    monkeypatch.setattr(working_weights, "is_sharded", lambda task: True)
    lever = WorkingWeights(task := Layers())
    lever.compile(FakeRun(task, precision=precision))
    assert not lever.used and capsys.readouterr().out == f"working_weights: not used, {reason}\n"


def test_where_there_is_nothing_to_keep(capsys):
    task = Layers()
    lever = WorkingWeights(task)
    lever.compile(FakeRun(task))
    lever.before_passes(FakeRun(task))
    assert not lever.keeps
    assert capsys.readouterr().out == "working_weights: not used, the run is in fp32\n"
    task.requires_grad_(False)
    with pytest.raises(ValueError, match="^working_weights: the model trains no"):
        lever.compile(FakeRun(task, precision="amp_bf16"))
