"""Components of installed packages: named with their package, checked without an import, and nothing else imported."""

import sys
from pathlib import Path

import pytest

from recipes.config import entry_points, source_code
from recipes.config.build import build
from recipes.config.command_line import help_text, user_errors
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import Component, ConfigError
from recipes.generation.exports import component_class

ROOT = Path(__file__).resolve().parents[3]
CODE = """
from recipes.training.callback import Callback


class Norm(Callback):
    def __init__(self, output, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"norm: every: {every}; give 1 or more")
        self.output, self.every = output, every
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """(lines of entry_points.txt) -> installs a package of these, which has one callback."""

    def install(lines):
        (tmp_path / "of_tests" / "inner").mkdir(parents=True)
        (tmp_path / "of_tests" / "__init__.py").write_text("raise AssertionError('imported')")
        (tmp_path / "of_tests" / "inner" / "norms.py").write_text(CODE)
        info = tmp_path / "of_tests-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-tests\nVersion: 1\n")
        (info / "entry_points.txt").write_text(lines)
        monkeypatch.syspath_prepend(tmp_path)
        entry_points._entries.cache_clear()
        return tmp_path / "of_tests"

    yield install
    monkeypatch.undo()
    entry_points._entries.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "of_tests"]:
        del sys.modules[name]


def read(*overrides):
    return load_config(ROOT / "yamls" / "openmoji_vae.yaml", list(overrides), Recipe, [])


CALLBACK = "[precompose.callback]\nnorm = of_tests.inner.norms:Norm\n"


def test_a_component_of_a_package_is_checked_and_then_built(package, capsys):
    folder = package(CALLBACK)
    recipe = read("callbacks.n={name: of-tests.norm, every: 3}", "checkpoints.allow_changes=[callbacks.n.every]")
    with pytest.raises(ConfigError, match="^callbacks.n.evry: unknown key of callback `of-tests.norm`; did"):
        read("callbacks.n={name: of-tests.norm, evry: 3}")
    assert "of-tests.norm" in help_text(Recipe, "")
    assert "of_tests" not in sys.modules
    (folder / "__init__.py").write_text("")
    norm = build(recipe.callbacks["n"], output="here")
    assert (norm.output, norm.every) == ("here", 3)
    recipe.callbacks["n"].args["every"] = 0
    with pytest.raises(SystemExit, match="2"), user_errors():
        build(recipe.callbacks["n"], output="here")
    assert capsys.readouterr().err == "error: callbacks.n: norm: every: 0; give 1 or more\n"


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("algorithm", "Lever"),
        ("logger", "Callable"),
        ("model", "Task"),
        ("optimizer", "Optimizer"),
        ("schedule", "Callable"),
        ("source", "Source"),
    ],
)
def test_a_component_in_the_wrong_group_is_not_left_out_silently(package, group, kind):
    folder = package(CALLBACK.replace("callback", group))
    (folder / "__init__.py").write_text("")
    component = Component(group, "of-tests.norm", {}, "of_tests.inner.norms:Norm", "here")
    with pytest.raises(ValueError, match=f"^here: .* an instance of Norm, and .* needs an instance of {kind} "):
        build(component, output="here")


@pytest.mark.parametrize("name", ["norm", "of_tests.inner.norms:Norm", "of_tests.inner.norms", "os:system"])
def test_a_recipe_cannot_name_a_module(package, name):
    package(CALLBACK)
    with pytest.raises(ConfigError, match=f"^callbacks.n.name: unknown callback '{name}'; "):
        read(f"callbacks.n={{name: '{name}'}}")
    assert "of_tests" not in sys.modules


def test_a_folder_of_the_checkout_does_not_hide_a_package(package, tmp_path, monkeypatch):
    """Such as my_package, in which pyproject.toml lies beside the package my_package."""
    folder = package(CALLBACK)
    (tmp_path / "checkout" / "of_tests").mkdir(parents=True)
    monkeypatch.setattr(source_code, "ROOT", tmp_path / "checkout")
    assert source_code.source_file("of_tests.inner.norms") == folder / "inner" / "norms.py"


def test_the_package_of_a_component_that_is_not_there_is_named():
    """As in a recipe or an export of somebody who has it."""
    with pytest.raises(ConfigError, match="^callbacks.n.name: .*; no package 'of-tests' that has it is installed; al"):
        read("callbacks.n={name: of-tests.norm}")


def test_a_name_of_this_repository_cannot_be_taken(package):
    package("[precompose.callback]\nexport = of_tests.inner.norms:Norm\n")
    assert read("callbacks.n={name: export}").callbacks["n"].target == "callbacks.export:Export"


def test_a_group_that_does_not_exist(package):
    package(CALLBACK.replace(".callback", ".callbacks"))
    with pytest.raises(ConfigError, match="^of-tests: entry points precompose.callbacks: no group .*mean `callback`"):
        read()


def test_a_module_that_is_not_there(package):
    package("[precompose.callback]\nnorm = of_tests.outer:Norm\n")
    with pytest.raises(ConfigError, match="of_tests.outer:Norm, which cannot be used: of_tests.outer: no such module"):
        read("callbacks.n={name: of-tests.norm}")


def test_a_module_that_only_imports_the_component(package):
    """Such as the package itself. The line said that no class of the name was there, and that nothing was allowed."""
    folder = package("[precompose.callback]\nnorm = of_tests:Norm\n")
    (folder / "__init__.py").write_text("from of_tests.inner.norms import Norm")
    line = "which cannot be used: .*__init__.py: `Norm` is imported there; name the module that defines it$"
    with pytest.raises(ConfigError, match=line):
        read("callbacks.n={name: of-tests.norm}")


def test_a_package_that_lacks_a_module_is_one_line(package, capsys):
    """Such as a library that is not installed here, or a module of this repository that was renamed."""
    folder = package(CALLBACK + CALLBACK.replace("callback", "objective"))
    (folder / "__init__.py").write_text("import not_installed")
    with pytest.raises(ValueError, match="^objective.name: objective `of-tests.norm` is .*, which cannot be imported"):
        component_class("objective", "of-tests.norm")  # as an export names it
    recipe = read("callbacks.n={name: of-tests.norm}")
    with pytest.raises(SystemExit, match="2"), user_errors():
        build(recipe.callbacks["n"], output="here")
    line = "error: callbacks.n.name: callback `of-tests.norm` is of_tests.inner.norms:Norm, which cannot be imported: "
    assert capsys.readouterr().err.startswith(
        f"{line}ModuleNotFoundError No module named 'not_installed' ({folder}/__init__.py, line 1); install what its"
    )


@pytest.mark.parametrize(("call", "code"), [("sys.exit(1)", "1"), ("sys.exit()", "None")])
def test_a_package_whose_import_ends_the_program_is_one_line(package, call, code):
    """Such as a script without a main block. Python ended with the status alone, without a word."""
    folder = package(CALLBACK)
    (folder / "__init__.py").write_text(f"import sys\n{call}")
    recipe = read("callbacks.n={name: of-tests.norm}")
    line = rf"of_tests.inner.norms:Norm, whose import ends the program: sys\.exit\({code}\); raise an error there, or"
    with pytest.raises(ValueError, match=f"^callbacks.n.name: callback `of-tests.norm` is {line}"):
        build(recipe.callbacks["n"], output="here")


def test_a_component_that_cannot_be_used_hinders_no_other(package):
    folder = package("[precompose.source]\nnorm = of_tests.inner.optional:Norm\n")
    (folder / "inner" / "optional.py").write_text(CODE.replace("every: int", "every: Optional[int]"))
    read("checkpoints.allow_changes=[data.source.urls]")
    assert "of-tests.norm" in help_text(Recipe, "")
    with pytest.raises(ConfigError, match=r"^data.source.name: .* has the type `Optional\[int\]`, which no key"):
        read("data.source={name: of-tests.norm}")
