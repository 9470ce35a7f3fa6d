"""What errors of hooks of one's own may do to the loops of both engines."""

import importlib

import pytest

from recipes.engines import parts
from recipes.training.callback import Callback
from recipes.training.lever import Lever


class Exhausted(Callback):
    """Takes the next value of an empty iterator in one hook."""

    def __init__(self, hook):
        setattr(self, hook, lambda run: next(iter([])))


@pytest.mark.parametrize(
    ("engine", "hook"),
    [
        ("composer", "before_data"),
        ("lightning", "batch_start"),
        ("lightning", "after_forward"),
        ("lightning", "step_end"),
        ("lightning", "eval_start"),
        ("lightning", "eval_after_forward"),
    ],
)
def test_a_hook_that_finds_nothing_next_does_not_end_the_run_as_complete(quick_recipe, tmp_path, engine, hook):
    """Or with Composer, where no batch would ever come, never."""
    recipe = quick_recipe(tmp_path, f"training={{engine: {engine}, duration: 2ba, eval_every: 1ba}}")
    build_trainer = importlib.import_module(f"recipes.engines.{engine}.trainer").build_trainer
    training = build_trainer(recipe, change=lambda parts: parts.callbacks.update(mine=Exhausted(hook)))
    with pytest.raises(RuntimeError, match="a hook or the model raised StopIteration"):
        training.fit()


class Late(Lever):
    def change_modules(self, run):
        assert run.clock.batch == 0


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_lever_that_asks_for_the_clock_before_there_is_one_is_one_line(quick_recipe, tmp_path, monkeypatch, engine):
    """With Composer it was an error of Python's about None."""
    build_levers = parts.build_levers
    monkeypatch.setattr(parts, "build_levers", lambda *arguments: [*build_levers(*arguments), Late()])
    recipe = quick_recipe(tmp_path, "training.duration=2ba", "checkpoints.save=false")
    build_trainer = importlib.import_module(f"recipes.engines.{engine}.trainer").build_trainer
    if engine == "composer":
        with pytest.raises(ValueError, match="^algorithms: run.clock was asked for in check_machine or change_modules"):
            build_trainer(recipe)
    else:
        build_trainer(recipe).module.configure_model()
