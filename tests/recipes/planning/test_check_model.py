"""What a run asks of its model is looked for before it starts."""

import pytest
import torch
from torch import nn

from recipes.models.task import Task
from recipes.planning.check_model import check_model


class Trains(Task):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(2, 2)

    def forward(self, batch):
        return {"total": self.weight(batch["x"]).mean()}


class Whole(Trains):
    def evaluate(self, batch):
        return {"loss": batch["x"]}

    def export(self, folder):
        pass

    def load_export(self, folder):
        pass


def test_methods_that_the_run_will_call(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path, "callbacks.export={name: export}", f"checkpoints.load_weights={tmp_path}")
    with pytest.raises(ValueError, match=rf"^model: Trains \({__name__}\) does not define evaluate, export, load_"):
        check_model(recipe, Trains())
    check_model(recipe, Whole())
    closed = Whole()
    closed.check_export = lambda: called.append("check_export")
    called = []
    check_model(recipe, closed)
    recipe.callbacks, recipe.evals, recipe.checkpoints.load_weights = {}, {}, None
    check_model(recipe, Trains())
    check_model(recipe, closed)
    assert called == ["check_export"]  # where a run exports
    with pytest.raises(ValueError, match=r"^model: Task \(recipes.models.task\) does not define forward, which this"):
        check_model(recipe, Task())


def test_a_model_of_which_nothing_is_trained(small_recipe, tmp_path):
    with pytest.raises(ValueError, match="Whole .* has no parameter that requires a gradient"):
        check_model(small_recipe(tmp_path), Whole().requires_grad_(False))


class Compiled(Whole):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(nn.Linear(2, 2))


class CompiledInPlace(Whole):
    def __init__(self):
        super().__init__()
        self.weight.compile()


class Counts(Whole):
    def get_extra_state(self):
        return {"count": 3}


def test_what_could_not_be_loaded_or_exported_again(small_recipe, tmp_path):
    """A checkpoint of the first was called one of another model, and the export of the last was a traceback."""
    recipe = small_recipe(tmp_path)
    with pytest.raises(ValueError, match=r"^model: net of Compiled is compiled by torch.compile.*method compile\(\)$"):
        check_model(recipe, Compiled())
    with pytest.raises(ValueError, match="^model: _extra_state of Counts is an instance of dict, and exports hold"):
        check_model(recipe, Counts())
    check_model(recipe, CompiledInPlace())
