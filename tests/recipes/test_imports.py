"""Imports go one way: models, data and callbacks know no config, and few files know the trainer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("callbacks", "data", "docs", "precompute", "recipes")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

# What only the scripts, and what builds from a config, may import.
CONFIG = {
    "recipes.build",
    "recipes.cli",
    "recipes.components",
    "recipes.config",
    "recipes.dry_run",
    "recipes.schema",
    "recipes.trainer",
    "recipes.values",
    "precompute.captions",
    "precompute.config",
    "precompute.job",
}
# Folder or file -> what it may not import, as modules or packages.
FORBIDDEN = {
    "data": CONFIG | {"recipes", "callbacks", "precompute", "composer"},
    "callbacks": CONFIG | {"precompute"},
    "recipes/models": CONFIG | {"callbacks", "data", "precompute", "composer"},
    "recipes/algorithms": CONFIG | {"callbacks", "data", "precompute"},
    # Networks that are trained here (recipes.models) are encoders of the next recipe.
    "precompute/encoders": CONFIG
    | {"recipes.algorithms", "recipes.builders", "recipes.composer_model", "recipes.sampling", "callbacks", "composer"},
    "recipes/builders.py": CONFIG | {"callbacks", "precompute"},
    "recipes/composer_model.py": CONFIG | {"callbacks", "data", "precompute"},
}
# Names of types alone, which builders' annotations need wherever they are.
ALWAYS = ("data.aliases",)
KNOWS_COMPOSER = (
    "callbacks",
    "recipes/algorithms",
    "recipes/builders.py",
    "recipes/composer_model.py",
    "recipes/trainer.py",
)
# What is read before a config is known to be right: everything else on import would cost seconds.
LIGHT = ("recipes/cli.py", "recipes/config.py", "recipes/schema.py", "recipes/values.py", "recipes/components.py")
LIGHT += ("recipes/train.py", "precompute/config.py", "precompute/encode.py", "precompute/vocabulary.py")
LIGHT += ("data/aliases.py", "data/manifest.py")
HEAVY = {"torch", "composer", "diffusers", "streaming", "numpy", "open_clip", "transformers", "PIL"}


def imports(file, only_on_import=False):
    """Every module that a file imports, names imported from a package included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = tree.body if only_on_import else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: import by the full name"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def under(name, places):
    """Whether a dotted module, or a path, lies in one of some."""
    separator = "/" if "/" in name or name.endswith(".py") else "."
    return any(name == place or name.startswith(place + separator) for place in places)


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_go_one_way(place):
    files = [file for file in FILES if under(file.relative_to(ROOT).as_posix(), [place])]
    assert files
    wrong = {
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imports(file)
        if under(module, FORBIDDEN[place]) and not under(module, ALWAYS)
    }
    assert not wrong


def test_few_files_know_composer():
    knowing = {
        file.relative_to(ROOT).as_posix() for file in FILES if any(under(m, ["composer"]) for m in imports(file))
    }
    assert "recipes/composer_model.py" in knowing
    assert {path for path in knowing if not under(path, KNOWS_COMPOSER)} == set()


@pytest.mark.parametrize("path", LIGHT)
def test_a_config_is_checked_without_heavy_imports(path):
    assert not [module for module in imports(ROOT / path, only_on_import=True) if under(module, HEAVY)]


def test_scripts_take_their_own_folder_off_the_path():
    scripts = [file for file in FILES if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    assert len(scripts) >= 4
    for script in scripts:
        body = ast.parse(script.read_text(encoding="utf-8")).body
        own = [n.lineno for n in body if isinstance(n, ast.ImportFrom) and under(n.module, PACKAGES)]
        changes = [n.lineno for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "sys.path[:]"]
        assert changes, f"{script}: its folder stays on the import path"
        assert changes[0] < min(own, default=changes[0] + 1)
