"""Classes of callbacks and levers of which a run would call nothing."""

import pytest

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


@pytest.fixture
def recipe_with(small_recipe, tmp_path, monkeypatch):
    """Gives a recipe with a callback or lever `mine` of a class."""

    def make(section, kind):
        named = {"callbacks": "progress", "algorithms": "channels_last"}[section]
        theirs = check_classes.import_builder
        builder = lambda component: kind if component.path.endswith("mine") else theirs(component)  # noqa: E731
        monkeypatch.setattr(check_classes, "import_builder", builder)
        return small_recipe(tmp_path, f"{section}.mine={{name: {named}}}")

    return make


@pytest.mark.parametrize(("section", "kind", "nothing"), [
    ("callbacks", Misspelled, True), ("callbacks", Keeps, False),
    ("algorithms", LateLever, True), ("algorithms", Changes, False),
])  # fmt: skip
def test_classes_that_define_no_method_of_a_run(recipe_with, section, kind, nothing):
    recipe = recipe_with(section, kind)
    if nothing:
        said = rf"^{section}.mine: {kind.__name__} \({__name__}\) does nothing: it defines none of the methods"
        with pytest.raises(ValueError, match=said):
            check_classes.check_classes(recipe)
    else:
        check_classes.check_classes(recipe)


class SavesLate(Changes):
    def after_save(self, run):
        raise AssertionError("not called")


class Clips(Misspelled):
    def step_end(self, run):
        pass

    def clip_gradients(self, run):
        raise AssertionError("not called")


@pytest.mark.parametrize(("section", "kind", "said"), [
    ("callbacks", Clips, "defines clip_gradients, which a run calls for levers alone; give it another name, or make a"),
    ("algorithms", SavesLate, "defines after_save, which a run calls for callbacks alone; give it another name, or"),
])  # fmt: skip
def test_methods_that_are_called_for_the_other_ones_alone(recipe_with, section, kind, said):
    """Other methods of the class were called, so that nothing showed that this one was not."""
    recipe = recipe_with(section, kind)
    with pytest.raises(ValueError, match=rf"^{section}.mine: {kind.__name__} \({__name__}\) {said}"):
        check_classes.check_classes(recipe)
