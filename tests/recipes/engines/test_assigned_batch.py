"""Batches that hooks of one's own put into the place of the loader's, with both engines."""

import importlib

import pytest

from recipes.training.callback import Callback

HOOKS = ("batch_start", "before_forward", "eval_before_forward")


class Replaces(Callback):
    """Assigns another dict to `run.batch` in one hook, and notes the names that the model is then given."""

    def __init__(self, hook):
        self.given = set()
        setattr(self, hook, self.assign)

    def assign(self, run):
        run.batch = run.batch | {"marked": next(iter(run.batch.values()))}

    def begin(self, run):
        for name in ("forward", "evaluate"):
            setattr(run.task, name, self.noted(name, getattr(run.task, name)))

    def noted(self, name, method):
        def called(batch):
            self.given |= {name} if "marked" in batch else set()
            return method(batch)

        return called


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_batch_that_a_hook_assigns_is_what_the_model_is_given(quick_recipe, tmp_path, engine, hook):
    """Composer's had no setter, and Lightning validated on the batch of before."""
    recipe = quick_recipe(tmp_path, f"training={{engine: {engine}, duration: 1ba, eval_every: 1ba}}", "algorithms={}")
    replaces = Replaces(hook)
    build_trainer = importlib.import_module(f"recipes.engines.{engine}.trainer").build_trainer
    build_trainer(recipe, change=lambda parts: parts.callbacks.update(mine=replaces)).fit()
    assert replaces.given == {"evaluate" if hook == "eval_before_forward" else "forward"}
