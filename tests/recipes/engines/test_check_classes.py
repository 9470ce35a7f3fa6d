"""Classes of callbacks and levers of which a run would call nothing."""

import pytest

from recipes.engines import check_classes, parts
from recipes.engines.composer.adapters import _LeverState, _RunCallback
from recipes.engines.composer.trainer import build_trainer
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


def named(name, base):
    return type(name, (base,), {"__module__": "mine"})


def test_a_class_with_the_name_of_one_of_the_engine_is_refused():
    """One state replaced the other in Composer's checkpoints, and both loaded it."""
    lever, callback = named("Mine", Lever)(), named("Mine", Callback)()
    check_classes.check_names([lever], {"mine": callback})
    said = r"the class \w+ \(mine\) has the name of one of the engine's, by which checkpoints hold states; give it an"
    with pytest.raises(ValueError, match=f"^callbacks.mine: {said}"):
        check_classes.check_names([lever], {"mine": named("Generators", Callback)()})
    lever = named("RunLevers", Lever)()
    lever.label_in_recipe = "mine"
    with pytest.raises(ValueError, match=f"^algorithms.mine: {said}"):
        check_classes.check_names([lever], {})


def test_a_run_checks_the_names_of_its_classes(quick_recipe, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(parts, "check_names", lambda levers, callbacks: given.extend(callbacks))
    recipe = quick_recipe(tmp_path)
    parts.build_parts(recipe, parts.Place.of(recipe, 1), "lightning")
    assert given == list(recipe.callbacks)


def test_all_of_the_engines_names_are_known(quick_recipe, tmp_path):
    """Also if Composer makes others, or another is added here."""
    trainer = build_trainer(quick_recipe(tmp_path, "training={duration: 1ba, progress_bar: true}"))
    found = [*trainer.state.callbacks, *trainer.state.algorithms]
    names = {type(one).__name__ for one in found if not isinstance(one, _RunCallback | _LeverState)}
    trainer.close()
    assert names <= check_classes.OF_ENGINE
