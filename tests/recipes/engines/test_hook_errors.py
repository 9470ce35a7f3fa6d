"""What errors of hooks of one's own may do to the loops of both engines."""

import importlib

import pytest

from recipes.training.callback import Callback


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
