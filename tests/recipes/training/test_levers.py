"""The order in which levers act."""

import inspect

import pytest

from recipes.training.hooks import Hooks
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from tests.recipes.training.fake_run import FakeRun

HOOKS = [name for name in vars(Hooks) if not name.startswith("_") and "state_dict" not in name]


def recorder(name, seen):
    """A lever that keeps what it was called for, and by which run."""

    class Recorder(Lever):
        def __getattribute__(self, hook):
            return lambda run: seen.append((name, hook, run))

    return Recorder()


@pytest.fixture
def recorded():
    """Two levers, a run, and a function that gives what the levers were called for since it was asked last."""
    seen, run = [], FakeRun()
    levers = Levers([recorder("one", seen), recorder("two", seen)])

    def calls():
        assert all(given is run for _, _, given in seen)
        found = [(name, hook) for name, hook, _ in seen]
        seen.clear()
        return found

    return levers, run, calls


def test_modules_change_before_anything_is_sharded_and_compiling_comes_last(recorded):
    levers, run, calls = recorded
    levers.prepare(run)
    hooks = ("check_machine", "change_modules", "shard")
    assert calls() == [(lever, hook) for hook in hooks for lever in ("one", "two")]
    levers.compile(run)
    assert calls() == [("one", "compile"), ("two", "compile")]


def test_gradients_are_unscaled_then_averaged_then_clipped(recorded):
    levers, run, calls = recorded
    levers.finish_gradients(run)
    stages = ["unscale_gradients", "average_gradients", "clip_gradients", "before_step"]
    assert calls() == [(name, stage) for stage in stages for name in ("one", "two")]


@pytest.mark.parametrize("hook", HOOKS)
def test_other_hooks_reach_levers_in_the_recipes_order(recorded, hook):
    levers, run, calls = recorded
    levers.call(hook, run)
    assert calls() == [("one", hook), ("two", hook)]


def test_some_act_before_and_after_those_of_the_recipe():
    seen, run = [], FakeRun()
    one, two, three = (recorder(name, seen) for name in ("one", "two", "three"))
    Levers([two], first=[one], last=[three]).prepare(run)
    assert [name for name, _, _ in seen] == ["one", "two", "three"] * 3


def test_they_are_what_they_were_made_of():
    made = [Lever(), Lever()]
    assert list(Levers(made, first=[Lever()], last=[Lever()])) == made


def test_a_lever_does_nothing_by_itself():
    lever, run = Lever(), FakeRun()
    methods = {name for name, _ in inspect.getmembers(Lever, inspect.isfunction) if not name.startswith("_")}
    for name in methods - {"state_dict", "load_state_dict"}:
        assert getattr(lever, name)(run) is None
    assert lever.state_dict() == {} and lever.load_state_dict({}) is None
