"""The scheduled average: when it begins, what it is, who uses it, and that resuming changes nothing."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from composer import Callback, DataSpec, Trainer
from composer.utils import dist as composer_dist
from torch import nn
from torch.utils.data import DataLoader

from recipes.algorithms.averaging import scheduled_ema
from recipes.algorithms.averaging.average import Average, HostAverage, bytes_of_average
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.engines.composer.model import ComposerTask
from recipes.models.task import Task
from recipes.training.clock import Clock
from tests.recipes.algorithms.averaging.ema_ranks import CHECKS
from tests.recipes.algorithms.composer_levers import algorithms_of, sharded_options, sharding_of
from tests.recipes.training.fake_run import FakeRun

DEVICES = ["same", "cpu"]


class Small(Task):
    """Weights, a frozen weight, and a buffer that changes in training."""

    eval_names = ("mean",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, batch):
        return {"total": (self.net(batch["x"]) - batch["y"]).square().mean()}

    def evaluate(self, batch):
        return {"mean": self.net(batch["x"])[:, 0]}


class Recorder(Callback):
    """The trained weights after every step, and those that validation saw."""

    def __init__(self):
        self.steps, self.seen = [], []

    def batch_end(self, state, logger):
        self.steps.append(weights(state.model))

    def eval_before_forward(self, state, logger):
        self.seen.append((state.timestamp.batch.value, weights(state.model)))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def flat(average):
    average.settle()
    return torch.cat([t.flatten() for t in average.shadow])


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    samples = [{"x": row, "y": row.sum()[None]} for row in x]
    loader = DataLoader(samples, batch_size=4, sampler=composer_dist.get_sampler(samples))  # 6 batches per epoch
    return DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch["x"]))


def trainer(ema, duration="12ba", checkpoints=None, folder=None, due=None, **options):
    """A Composer run with an average, or without if `ema` is None; sharded if the kind of checkpoints is given, which
    are saved in a folder where they are due."""
    task = Small()
    levers = [] if ema is None else [ema]
    if checkpoints is None:
        options["algorithms"] = algorithms_of(levers, task)
        if folder is not None:
            options |= {"save_folder": folder, "save_interval": due}
    else:
        options |= sharded_options([*levers, sharding_of(task)], task, checkpoints, folder=folder, due=due)
    recorder = Recorder()
    made = Trainer(
        model=ComposerTask(task),
        train_dataloader=loader(),
        max_duration=duration,
        optimizers=torch.optim.SGD([p for p in task.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
        callbacks=[recorder, *options.pop("callbacks", [])],
        device="cpu",
        progress_bar=False,
        seed=3,
        **options,
    )
    made.recorder = recorder
    return made


def fit(ema, duration="12ba", **options):
    made = trainer(ema, duration, **options)
    made.fit()
    made.close()
    return made


def closed_form(steps, start, every, keep):
    """The sum over the sampled weights, in 64-bit: keep^n of the first, (1 - keep) keep^(n - i) of the i-th."""
    taken = [
        step.double() for step in steps[start - 1 :: every]
    ]  # after batch number `start`, the weights are [start - 1]
    n = len(taken) - 1
    return keep**n * taken[0] + sum((1 - keep) * keep ** (n - i) * taken[i] for i in range(1, n + 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("arguments", "start", "every", "keep"),
    [
        ({"decay": 0.9, "start": "4ba"}, 4, 1, 0.9),
        ({"decay": 0.9999, "last": "5ba"}, 7, 1, 0.9999),
        ({"half_life": "3ba", "start": "0.25dur", "every": 2}, 3, 2, 0.5 ** (2 / 3)),
        ({"decay": 0.5, "last": "1ep", "every": 3}, 6, 3, 0.5),
    ],
)
def test_it_is_the_closed_form(device, arguments, start, every, keep):
    ema = ScheduledEMA(device=device, **arguments)
    made = fit(ema)
    assert ema.begun == start and type(ema.average) is (HostAverage if device == "cpu" else Average)
    want = closed_form(made.recorder.steps, start, every, keep)
    assert (flat(ema.average) - want).abs().max() <= 1e-6 * want.abs().max()
    assert (flat(ema.average) - made.recorder.steps[-1]).abs().max() > 0


def test_from_the_first_batch_it_starts_at_the_initial_weights():
    ema = ScheduledEMA(decay=0.5)
    made = fit(ema, "2ba")
    initial = weights(Small())
    want = closed_form([initial, *made.recorder.steps], 1, 1, 0.5)
    assert ema.begun == 0
    assert (flat(ema.average) - want).abs().max() <= 1e-6


def test_nothing_is_held_before_the_start():
    ema = ScheduledEMA(decay=0.9, start="5ba")
    held = []

    class Watch(Callback):
        def batch_end(self, state, logger):
            held.append((state.timestamp.batch.value, ema.average is None, "average" in ema.state_dict()))

    made = trainer(ema, "6ba")
    made.state.callbacks.append(Watch())
    made.fit()
    assert held == [(n, n < 5, n >= 5) for n in range(1, 7)]


@pytest.mark.parametrize("device", DEVICES)
def test_validation_has_the_averaged_weights_and_training_its_own(device):
    plain = fit(None)
    ema = ScheduledEMA(decay=0.9, start="4ba", device=device)
    made = fit(ema, eval_dataloader=loader(), eval_interval="3ba")
    assert torch.equal(made.recorder.steps[-1], plain.recorder.steps[-1])  # the training is untouched
    assert torch.equal(weights(made.state.model), made.recorder.steps[-1])
    for batch, seen in made.recorder.seen:
        steps = made.recorder.steps[:batch]
        want = closed_form(steps, 4, 1, 0.9) if batch >= 4 else steps[-1].double()
        assert (seen - want).abs().max() <= 1e-6, batch
    assert {batch for batch, _ in made.recorder.seen} == {3, 6, 9, 12}


@pytest.mark.parametrize("device", DEVICES)
def test_in_and_out_is_exact_whatever_happens_inside(device):
    ema = ScheduledEMA(decay=0.9, start="4ba", device=device)
    made = fit(ema)
    model = made.state.model.task
    before = {name: t.clone() for name, t in model.state_dict().items()}
    average, places = flat(ema.average).clone(), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyError), ema.applied() as there:
        assert there
        with ema.applied():  # a sampler inside of a validation
            pass
        assert torch.equal(weights(model), average)
        # Buffers and frozen parameters are those of the model.
        assert torch.equal(model.net[1].running_mean, before["net.1.running_mean"])
        assert torch.equal(model.frozen, before["frozen"])
        with pytest.raises(RuntimeError, match="checkpoint"):
            ema.state_dict()
        raise KeyError
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(flat(ema.average), average)
    assert places == [p.data_ptr() for p in model.parameters()]
    ema.enter()
    ema.enter()
    ema.batch_start(FakeRun(model))  # which no use of the averaged weights reaches, unless an exception ended it
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_before_the_average_begins_the_model_keeps_its_weights():
    ema = ScheduledEMA(decay=0.9, start="11ba")
    model = Small()
    before = weights(model)
    ema.change_modules(FakeRun(model))
    with ema.applied() as there:
        assert not there
        assert torch.equal(weights(model), before)


def test_a_broken_validation_does_not_leave_the_average_in_the_model():
    ema = ScheduledEMA(decay=0.9, start="2ba")
    made = trainer(ema, "3ba", eval_dataloader=loader(), eval_interval="3ba")

    class Fails(Callback):
        def eval_batch_start(self, state, logger):
            raise KeyError

    made.state.callbacks.append(Fails())
    with pytest.raises(KeyError):
        made.fit()
    assert ema.average.inside
    made.state.callbacks.pop()
    assert made.recorder.steps[-1].ne(weights(made.state.model)).any()
    made.state.max_duration = "4ba"
    for evaluator in made.state.evaluators:
        evaluator.eval_interval = lambda state, event: False
    made.fit()
    plain = fit(None, "4ba")
    assert torch.equal(weights(made.state.model), plain.recorder.steps[-1])


@pytest.mark.parametrize("device", DEVICES)
def test_resuming_before_at_and_after_the_start_changes_nothing(tmp_path, device):
    arguments = {"half_life": "2ba", "start": "5ba", "every": 2, "device": device}
    whole = ScheduledEMA(**arguments)
    made = fit(whole, save_folder=str(tmp_path / "whole"), save_interval="1ba")
    for batch in (3, 5, 6, 7):
        ema = ScheduledEMA(**arguments)
        saved = next((tmp_path / "whole").glob(f"*-ba{batch}-rank0.pt"))
        resumed = trainer(ema, load_path=str(saved))
        assert (ema.average is None) == (batch < 5)
        resumed.fit()
        resumed.close()
        assert len(resumed.recorder.steps) == 12 - batch
        assert torch.equal(weights(resumed.state.model), weights(made.state.model))
        assert ema.begun == whole.begun == 5
        assert (flat(ema.average) - flat(whole.average)).abs().max() == 0.0, batch


def test_a_checkpoint_of_another_model_is_refused():
    average = Average(Small())
    tensors = average.tensors()
    with pytest.raises(ValueError, match=r"other parameters: net.0.bias"):
        average.load({name: t for name, t in tensors.items() if name != "net.0.bias"})
    with pytest.raises(ValueError, match=r"other parameters: net.9.bias"):
        average.load(tensors | {"net.9.bias": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"net.0.bias has shape \(2,\), the model \(8,\)"):
        average.load(tensors | {"net.0.bias": torch.zeros(2)})


@pytest.mark.parametrize("kind", [Average, HostAverage])
def test_parameters_of_16_bits_have_a_32_bit_average(kind):
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    model.extra = nn.Parameter(torch.randn(5))  # and a 32-bit one beside them
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    average = kind(model)
    assert average.bytes == bytes_of_average(model) == 4 * (64 * 64 + 5)
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    for _ in range(10):
        average.update(0.999)
    average.settle()
    keep = 0.999**10
    want = keep * first.double() + (1 - keep) * model.weight.double()
    assert average.shadow[0].dtype == torch.float32
    assert (average.shadow[0] - want).abs().max() < 1e-5
    with torch.no_grad():
        torch._foreach_add_(average.parameters, 1)  # a step without an update
    raw, kept = weights(model), [t.clone() for t in average.shadow]
    average.put_in()
    assert torch.equal(model.weight, kept[0].bfloat16())
    average.take_out()
    assert torch.equal(weights(model), raw) and all(map(torch.equal, average.shadow, kept))
    # No mixture of both kinds stays where memory ends in between.
    put_in = average._put_in
    average._put_in = lambda number, current: 1 / 0 if number else put_in(number, current)
    with pytest.raises(ZeroDivisionError):
        average.put_in()
    assert torch.equal(weights(model), raw) and all(map(torch.equal, average.shadow, kept))


def test_what_needs_the_average_waits_for_its_thread():
    """The next update, a checkpoint, an exchange, and a checkpoint that is loaded, while an update takes its time."""
    model = Small()
    average, plain = HostAverage(model), Average(model)
    blend = average._blend
    average._blend = lambda current, keep: time.sleep(0.02) or blend(current, keep)

    def update():
        with torch.no_grad():
            for parameter in average.parameters:
                parameter.add_(torch.randn_like(parameter))
        average.update(0.5)
        plain.update(0.5)

    update()
    update()
    tensors, wanted = average.tensors(), plain.tensors()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())
    update()
    average.put_in()
    assert torch.equal(weights(model), flat(plain))
    average.take_out()
    saved, before = {name: tensor.clone() for name, tensor in wanted.items()}, flat(plain)
    update()
    average.load(saved)
    assert torch.equal(flat(average), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either decay or half_life"),
        ({"decay": 0.9, "half_life": "5ba"}, "give either decay or half_life"),
        ({"decay": 1.0}, "decay must lie between 0 and 1, got 1.0"),
        ({"decay": 0.9, "start": "1ba", "last": "1ba"}, "contradict each other"),
        ({"decay": 0.9, "every": 0}, "every must be at least 1"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScheduledEMA(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 0.9, "start": "12ba"}, "start: 12ba leaves nothing to average in a run of 12ba"),
        ({"decay": 0.9, "start": "2ep"}, "start: 2ep leaves nothing"),
        ({"decay": 0.9, "start": "1dur"}, "start: 1dur leaves nothing"),
        ({"decay": 0.9, "last": "13ba"}, "last: 13ba is longer than the run of 12ba"),
        ({"decay": 0.9, "last": "20sp"}, "last: 20sp cannot be taken from a run of 12ba"),
        ({"decay": 0.9, "start": "10ba", "every": 5}, "every: 5 none of its updates"),
        ({"decay": 0.9, "every": 13}, "start: 0ba leaves 12 batches of the run, and every: 13 none"),
        ({"half_life": "20sp"}, "half_life must be a number of batches"),
        ({"half_life": "0ba"}, "half_life must be a number of batches above 0, got 0ba"),
    ],
)
def test_a_start_that_the_run_does_not_have_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer(ScheduledEMA(**arguments)).fit()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"decay": 0.9999, "last": "5000ba"}, "61% of the average will be the weights with which it began"),
        ({"half_life": "4000ba", "start": "0.8dur", "every": 1000}, "71% of the average"),
        ({"decay": 0.999, "last": "5000ba"}, ""),
        ({"decay": 0.9999, "start": "1ep"}, ""),  # nobody knows here how many batches an epoch has
    ],
)
def test_an_average_that_stays_near_its_beginning(arguments, said, capsys):
    ScheduledEMA(**arguments).check_run(SimpleNamespace(clock=Clock(0, 0, 0, "10000ba")))
    found = capsys.readouterr().out
    assert said in found and bool(said) == bool(found)
    (ema := ScheduledEMA(**arguments)).begun = 0  # by the checkpoint of a shorter run
    ema.check_run(SimpleNamespace(clock=Clock(9, 0, 0, "100000ba")))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("start", "batch"), [("0.07dur", 7), ("0.29dur", 29), ("0.555dur", 56)])
def test_a_share_of_a_run_is_a_whole_number_of_batches(start, batch):
    """0.07 times 100 is slightly more than 7, and 0.29 times 100 slightly less than 29."""
    ema = ScheduledEMA(decay=0.9, start=start)
    ema.check_run(SimpleNamespace(clock=Clock(0, 0, 0, "100ba")))
    assert ema.begins == (batch, "ba")


def test_an_average_of_the_whole_run_may_be_asked_for_by_its_length():
    ema = ScheduledEMA(decay=0.9, last="100ba")
    ema.check_run(SimpleNamespace(clock=Clock(0, 0, 0, "100ba")))
    assert ema.begins == (0, "ba")


@pytest.mark.parametrize("batch", [0, 5, 7])
def test_an_average_that_begins_late_says_so(batch, capsys):
    """A checkpoint of a run without an average, in a run that would have begun it at batch 5."""
    ema, run = ScheduledEMA(decay=0.9, start="5ba"), FakeRun(nn.Linear(3, 3), duration="10ba")
    ema.change_modules(run)
    ema.begin(run.at(batch))
    assert ema.begun == (batch if batch >= 5 else None)
    assert ("has no average; it begins here" in capsys.readouterr().out) == (batch == 7)


def test_the_end_of_a_run_fails_if_the_last_update_did():
    ema, run = ScheduledEMA(decay=0.9, device="cpu"), FakeRun(nn.Linear(3, 3), duration="10ba")
    ema.change_modules(run)
    ema.begin(run.at(0))
    ema.average.work = SimpleNamespace(result=lambda: 1 / 0)  # of the last update
    with pytest.raises(ZeroDivisionError):
        ema.end(run.at(10))


@pytest.mark.parametrize(("start", "warned"), [("2000sp", True), ("0ba", False)])
def test_a_run_that_ends_before_its_average_begins_warns(start, warned, capsys):
    """How many samples a batch has is not known when the start is checked."""
    ema, run = ScheduledEMA(decay=0.9, start=start), FakeRun(nn.Linear(3, 3), duration="10ba")
    ema.change_modules(run)
    ema.begin(run.at(0))
    ema.end(run.at(10))
    warning = "scheduled_ema: the run ended before the average began, at 2000sp: its exports"
    assert (warning in capsys.readouterr().out) == warned


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(ValueError, match="no trained parameters"):
        Average(Small().requires_grad_(False))


def test_checkpoints_of_earlier_versions_load():
    """They name parameters as the model around the task did."""
    model = Small()
    before = weights(model)
    ema = ScheduledEMA(decay=0.9)
    ema.change_modules(FakeRun(model))
    whole = Average(Small()).tensors()
    ema.load_state_dict({"begun": 3, "average": {f"task.{name}": tensor + 1 for name, tensor in whole.items()}})
    assert ema.begun == 3
    assert torch.equal(flat(ema.average), before + 1) and torch.equal(weights(model), before)


def test_a_model_may_have_a_part_named_task():
    model = torch.nn.ModuleDict({"task": Small()})
    ema = ScheduledEMA(decay=0.9)
    ema.change_modules(FakeRun(model))
    ema.load_state_dict({"begun": 3, "average": Average(model).tensors()})
    assert torch.equal(flat(ema.average), weights(model))


def test_updates_run_inside_the_contexts_of_watchers_and_steps_wait_for_copies(monkeypatch):
    entered, steps = [], []
    monkeypatch.setattr(Average, "before_step", lambda average: steps.append(average))
    ema = ScheduledEMA(decay=0.9, start="4ba", every=3)
    ema.watch(lambda: nullcontext(entered.append(ema.average is None)))
    fit(ema)
    assert entered == [True, False, False]  # batches 4 (it begins), 7 and 10
    assert steps == 8 * [ema.average]  # batches 5 to 12


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_sharded_models_on_two_ranks(two_ranks, check):
    two_ranks(check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", [Average, HostAverage])
def test_on_a_gpu_it_is_the_average_of_the_cpu(kind):
    torch.manual_seed(0)
    # Enough to copy that the optimizer would overtake the copy if it did not wait.
    plain = nn.Sequential(nn.Conv2d(256, 512, 3), nn.Conv2d(512, 512, 3)).to(memory_format=torch.channels_last)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Conv2d(256, 512, 3), nn.Conv2d(512, 512, 3)).to(memory_format=torch.channels_last)
    model.load_state_dict(plain.state_dict())
    averages = Average(plain), kind(model)
    for step in range(20):
        averages[1].before_step()
        with torch.no_grad():
            for parameter in [*plain.parameters(), *model.parameters()]:
                parameter.mul_(1.5 if step % 2 else 0.5).add_(step)
        for average in averages:
            average.update(0.9)
    averages[1].settle()
    for name, want, shadow in zip(averages[0].names, averages[0].shadow, averages[1].shadow, strict=True):
        torch.testing.assert_close(shadow.cpu(), want, rtol=1e-5, atol=1e-5, msg=name)
    raw = [p.detach().clone() for p in model.parameters()]
    averages[1].put_in()
    for parameter, want in zip(model.parameters(), averages[0].shadow, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), want, rtol=1e-5, atol=1e-5)
    averages[1].take_out()
    assert all(torch.equal(p, r) for p, r in zip(model.parameters(), raw, strict=True))


@pytest.mark.parametrize(("free", "device", "said"), [(47, "same", True), (48, "same", False), (0, "cpu", False)])
def test_an_average_that_will_not_fit(monkeypatch, capsys, free, device, said):
    """Steps of a run that begins its average after days, on a GPU that is nearly full."""
    monkeypatch.setattr(scheduled_ema, "free_memory", lambda: free)
    monkeypatch.setattr(FakeRun, "on_gpu", True)
    ema, run = ScheduledEMA(decay=0.9999, last="5ba", device=device), FakeRun(nn.Linear(3, 3), duration="100ba")
    ema.change_modules(run)
    ema.begin(run)
    for batch in range(1, 10):
        ema.step_end(run.at(batch))
        assert ("95ba and takes 0.0 MB of each GPU" in capsys.readouterr().out) == (said and batch == 3)
