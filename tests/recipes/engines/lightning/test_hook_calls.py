"""What hooks of one's own may do to Lightning's loops."""

import pytest

from recipes.engines.lightning.trainer import build_trainer
from recipes.training.callback import Callback


class Exhausted(Callback):
    """Takes the next value of an empty iterator in one hook."""

    def __init__(self, hook):
        setattr(self, hook, lambda run: next(iter([])))


@pytest.mark.parametrize("hook", ["batch_start", "after_forward", "step_end", "eval_start", "eval_after_forward"])
def test_a_hook_that_finds_nothing_next_does_not_end_the_run_as_complete(quick_recipe, tmp_path, hook):
    recipe = quick_recipe(tmp_path, "training={engine: lightning, duration: 2ba, eval_every: 1ba}")
    training = build_trainer(recipe, change=lambda parts: parts.callbacks.update(mine=Exhausted(hook)))
    with pytest.raises(RuntimeError, match="a hook or the model raised StopIteration"):
        training.fit()
