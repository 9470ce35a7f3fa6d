"""What a run asks of its model is looked for before it starts."""

import pytest
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
    recipe.callbacks, recipe.evals, recipe.checkpoints.load_weights = {}, {}, None
    check_model(recipe, Trains())
    with pytest.raises(ValueError, match=r"^model: Task \(recipes.models.task\) does not define forward, which this"):
        check_model(recipe, Task())


def test_a_model_of_which_nothing_is_trained(small_recipe, tmp_path):
    with pytest.raises(ValueError, match="Whole .* has no parameter that requires a gradient"):
        check_model(small_recipe(tmp_path), Whole().requires_grad_(False))
