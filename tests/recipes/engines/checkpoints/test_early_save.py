"""Checkpoints that are saved before what may fail at the same batch."""

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from recipes.config.components import COMPONENTS
from recipes.engines.checkpoints import early_save
from recipes.engines.checkpoints.early_save import EarlySave
from recipes.training.callback import Callback
from recipes.training.checkpoint_names import KINDS
from recipes.training.lever import Lever
from tests.recipes.engines.recording import Recorder, assert_bit_equal, record
from tests.recipes.training.fake_run import FakeRun

SHORT = ["training={duration: 6ba, eval_every: 3ba}", "checkpoints={every: 3ba, keep: -1, autoresume: true}"]
SHORT += ["loggers={}", "callbacks.export=null"]
SHORT += ["callbacks={progress: null, throughput: null, lr_monitor: null, memory_monitor: null, sample_grid: null}"]
SHORT += ["algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}"]


class Fails(Recorder):
    """Fails at batch 3, after the checkpoint or in validation."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def after_save(self, run):
        self._fail("callback", run)

    def eval_end(self, run):
        self._fail("validation", run)

    def _fail(self, where, run):
        if where == self.where and run.clock.batch == 3:
            raise RuntimeError("on purpose")


class Draws(Recorder):
    """Draws random numbers after the checkpoint, which training draws too, and counts validations in its state."""

    def __init__(self):
        super().__init__()
        self.drawn = []
        self.validations = 0

    def after_save(self, run):
        self.drawn.append(torch.rand(1).item())

    def eval_end(self, run):
        super().eval_end(run)
        self.validations += 1

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state):
        self.validations = state["validations"]


@pytest.fixture(scope="module")
def whole(quick_recipe, tmp_path_factory):
    """A run without a stop."""
    return record("composer", quick_recipe(tmp_path_factory.mktemp("whole"), *SHORT))


@pytest.mark.parametrize("where", ["callback", "validation"])
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_what_fails_after_a_batch_costs_no_training(whole, quick_recipe, tmp_path, engine, where):
    recipe = quick_recipe(tmp_path, *SHORT)
    with pytest.raises(RuntimeError, match="on purpose"):
        record(engine, recipe, Fails(where))
    assert "-ba3" in (tmp_path / "checkpoints" / KINDS[engine].link).resolve().name
    rest = record(engine, recipe)
    assert len(rest.losses) == 3 and [batch for batch, *_ in rest.evals] == [6]
    assert_bit_equal(rest, whole)


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_resume_has_what_callbacks_drew_and_counted_after_the_checkpoint_was_due(quick_recipe, tmp_path, engine):
    uninterrupted = record(engine, quick_recipe(tmp_path / "whole", *SHORT), Draws())
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba3" in path.name)
    rest = record(engine, quick_recipe(tmp_path / "rest", *SHORT, f"checkpoints.load_path={path}"), Draws())
    assert len(rest.losses) == 3
    assert_bit_equal(rest, uninterrupted)
    assert rest.drawn == uninterrupted.drawn[-len(rest.drawn) :]
    assert rest.validations == uninterrupted.validations == 2


class Counts(Lever):
    """Counts validations in its state and in a buffer of the model."""

    def __init__(self, task):
        self.task, self.count, self.large = task, 0, torch.zeros(2**16 + 1)
        task.register_buffer("count", torch.zeros(()))

    def eval_end(self, run):
        self.count += 1
        self.task.count += 1

    def state_dict(self):
        return {"count": self.count, "large": [self.large]}

    def load_state_dict(self, state):
        self.count = state["count"]


class CountsInside(Recorder):
    """Keeps what the lever of a run has counted at the end."""

    def end(self, run):
        super().end(run)
        (lever,) = (lever for lever in self.levers if isinstance(lever, Counts))
        self.counted = lever.count, run.task.count.item()


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_resume_has_what_a_lever_changed_in_validation(quick_recipe, tmp_path, monkeypatch, engine):
    monkeypatch.setitem(COMPONENTS["algorithm"], "counts", f"{__name__}:Counts")
    counts = "algorithms.counts={name: counts}"
    whole = record(engine, quick_recipe(tmp_path / "whole", *SHORT, counts), CountsInside())
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba3" in path.name)
    rest = record(
        engine, quick_recipe(tmp_path / "rest", *SHORT, counts, f"checkpoints.load_path={path}"), CountsInside()
    )
    assert len(rest.losses) == 3
    assert rest.counted == whole.counted == (2, 2)
    assert_bit_equal(rest, whole)


@pytest.mark.parametrize(("change", "again"), [
    (lambda lever, run: setattr(lever, "count", 1), True),
    (lambda lever, run: lever.task.count.add_(1), True),
    (lambda lever, run: run.optimizer.param_groups[0].update(lr=0.5), True),
    (lambda lever, run: lever.large.add_(1), False),  # as the average of weights is not hashed
])  # fmt: skip
def test_it_is_saved_again_where_anything_small_has_changed(monkeypatch, change, again):
    monkeypatch.setattr(early_save, "is_worth_keeping", lambda run: True)
    lever = Counts(torch.nn.Linear(2, 2))
    run, end = run_of(Changes(), [], lever=lever)
    then = ["saves 2 again"] if again else ["flushes"]
    assert end(2, then=lambda: change(lever, run)) == ["holds", "saves 2", "acts", *then, "copies"]


class Changes(Callback):
    """Has a state."""

    def __init__(self):
        self.state = {"seen": torch.zeros(3), "name": "a"}

    def state_dict(self):
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in self.state.items()}


def run_of(callback, saved, every="2ba", duration="8ba", minutes=None, lever=None):
    """Gives a function of a batch: what an engine does at its end, with what happens after the checkpoint."""
    run = FakeRun(None if lever is None else lever.task, duration=duration)
    files = SimpleNamespace(
        hold_copies=lambda: saved.append("holds"),
        flush=lambda: saved.append("flushes"),
        copy_held=lambda: saved.append("copies"),
    )
    early = EarlySave(run, [callback], files, every, minutes, [] if lever is None else [lever])

    def end(batch, then=lambda: None, stopping=False, overdue=False):
        run.at(batch).stopping, run.overdue = stopping, overdue
        early.before(lambda: saved.append(f"saves {batch}"))
        saved.append("acts")
        then()
        early.after(lambda: saved.append(f"saves {batch} again"))
        return [saved.pop(0) for _ in range(len(saved))]

    return run, end


def test_it_is_saved_again_where_a_state_has_changed(monkeypatch):
    callback, looked = Changes(), []
    monkeypatch.setattr(early_save, "is_worth_keeping", lambda run: looked.append(run.clock.batch) or True)
    run, end = run_of(callback, [])
    assert end(1) == ["acts"]
    assert end(2) == ["holds", "saves 2", "acts", "flushes", "copies"]
    assert end(3, then=lambda: torch.rand(1)) == ["acts"]
    again = ["holds", "saves 4", "acts", "saves 4 again", "copies"]
    assert end(4, then=lambda: callback.state.update(seen=torch.tensor([0.0, 1.0, 0.0]))) == again
    assert end(6, then=lambda: torch.rand(1)) == [line.replace("4", "6") for line in again]
    assert end(7, stopping=True) == ["holds", "saves 7", "acts", "flushes", "copies"]
    assert end(8) == ["acts"]  # the end, after which a run is not evaluated again
    assert looked == [2, 4, 6, 7]  # at all weights, for which the host waits


def test_nothing_is_saved_before_the_epoch_counts_with_which_a_run_ends(monkeypatch):
    """Also where the run is to stop, or a checkpoint is overdue: the next start would validate again."""
    monkeypatch.setattr(early_save, "is_worth_keeping", lambda run: True)
    run, end = run_of(Changes(), [], duration="2ep")
    run.clock = replace(run.clock, epoch_batches=2, epoch_began=0)
    assert end(2, stopping=True) == ["holds", "saves 2", "acts", "flushes", "copies"]  # it goes on after this epoch
    run.clock = replace(run.clock, epoch=1, epoch_began=2)
    assert end(4, stopping=True) == end(4, overdue=True) == ["acts"]


def test_one_is_also_saved_when_the_newest_is_too_old(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(early_save.time, "monotonic", lambda: now)
    run, end = run_of(Changes(), [], every="4ba", minutes=2)
    saves = ["holds", "saves", "acts", "flushes", "copies"]
    assert run.save_from == float("inf")
    assert end(1) == ["acts"] and run.save_from == 1120.0  # from the first batch on
    now = 1130.0
    assert end(2, overdue=True) == [line.replace("saves", "saves 2") for line in saves]
    assert not run.overdue and run.save_from == 1250.0  # Composer asks again if an epoch ends here
    now = 1140.0
    run.nonfinite = 1
    assert end(3, overdue=True) == ["acts"] and run.overdue and run.save_from == 1250.0
    run.nonfinite = 0
    assert end(4) == [line.replace("saves", "saves 4") for line in saves] and run.save_from == 1260.0


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_the_time_between_checkpoints_is_limited(quick_recipe, tmp_path, engine):
    """Here each batch but the first, from which the time counts, is longer than the limit."""
    recipe = quick_recipe(tmp_path, *SHORT, "checkpoints={every: null, minutes: 1e-9}")
    whole = record(engine, recipe)
    saved = {int(re.search(r"-ba(\d+)", path.name)[1]): path for path in (tmp_path / "checkpoints").glob("ep*")}
    assert sorted(saved) == [2, 3, 4, 5, 6]
    again = quick_recipe(tmp_path / "rest", *SHORT, f"checkpoints={{minutes: 1e-9, load_path: {saved[4]}}}")
    rest = record(engine, again)
    assert len(rest.losses) == 2
    assert_bit_equal(rest, whole)


def test_what_is_not_finite_is_not_saved_early():
    run, end = run_of(Changes(), [])
    run.nonfinite = 1
    assert end(2) == ["acts"]


def test_a_checkpoint_that_lacks_what_has_no_state_loads_without_a_warning(quick_recipe, tmp_path):
    """As one of an earlier version, a full one that was a sharded one, or one from before the recipe had a part."""
    whole = record("composer", quick_recipe(tmp_path / "whole", *SHORT))
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba3" in path.name)
    saved = torch.load(path, weights_only=False)
    for name in ("SaveEarly", "Recorder"):
        del saved["state"]["callbacks"][name]
    torch.save(saved, path)
    new = [
        f"checkpoints.load_path={path}",
        "callbacks.memory_monitor={name: memory_monitor}",
        "algorithms.activation_checkpointing={name: activation_checkpointing}",
    ]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rest = record("composer", quick_recipe(tmp_path / "rest", *SHORT, *new))
    assert not [warning for warning in warned if "is not in the state_dict" in str(warning.message)]
    assert_bit_equal(rest, whole)
