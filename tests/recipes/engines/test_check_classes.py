"""Classes of callbacks and levers of which a run would call nothing."""

import pytest
import torch

from recipes.engines import check_classes
from recipes.training.callback import Callback
from recipes.training.lever import Lever


class Misspelled(Callback):
    def on_batch_end(self, run):
        raise AssertionError("not called")


class Keeps(Callback):
    def state_dict(self):
        return {}


class LateLever(Lever):
    averages = True

    def after_backwards(self, run):
        raise AssertionError("not called")


class Changes(Lever):
    def change_modules(self, run):
        pass


@pytest.mark.parametrize(("section", "kind", "nothing"), [
    ("callbacks", Misspelled, True), ("callbacks", Keeps, False),
    ("algorithms", LateLever, True), ("algorithms", Changes, False),
])  # fmt: skip
def test_classes_that_define_no_method_of_a_run(small_recipe, tmp_path, monkeypatch, section, kind, nothing):
    named = {"callbacks": "progress", "algorithms": "channels_last"}[section]
    recipe = small_recipe(tmp_path, f"{section}.mine={{name: {named}}}")
    theirs = check_classes.import_builder
    builder = lambda component: kind if component.path.endswith("mine") else theirs(component)  # noqa: E731
    monkeypatch.setattr(check_classes, "import_builder", builder)
    if nothing:
        said = rf"^{section}.mine: {kind.__name__} \({__name__}\) does nothing: it defines none of the methods"
        with pytest.raises(ValueError, match=said):
            check_classes.check_classes(recipe)
    else:
        check_classes.check_classes(recipe)


def test_the_step_of_an_optimizer_takes_a_closure():
    """Lightning gave it one in the first batch, where it was a TypeError."""

    class Bare(torch.optim.SGD):
        def step(self):
            raise AssertionError("not called")

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    check_classes.check_step(torch.optim.SGD(parameters, lr=1.0))
    with pytest.raises(ValueError, match=r"^optimizer: Bare.step \(.*\) takes no closure; define step\(self, closure="):
        check_classes.check_step(Bare(parameters, lr=1.0))
