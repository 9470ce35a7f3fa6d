"""Imports go one way between the rooms of the repository, and few files know the trainer."""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import data.tokenizers.clip_library

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("callbacks", "cluster", "data", "docs", "precompute", "recipes")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

# Which room may import from which, besides itself. Rooms and entry points are named by their paths; the longest name
# that a file's path begins with is its room.
DATA = ("data", "data/system", "data/remote", "data/tokenizers")
PRECOMPUTE = (*DATA, "recipes/config", "precompute/config.py", "precompute/output")
SHARED = (*DATA, "recipes/config", "recipes/models", "recipes/encoders")
ARROWS = {
    "data/system": (),
    "data/remote": ("data/system",),
    "data/tokenizers": ("data/system",),
    "data": DATA[1:],
    "recipes/config": DATA,
    "recipes/models": DATA,
    "recipes/encoders": (*DATA, "recipes/models"),
    "recipes/training": (*DATA, "recipes/models"),
    "recipes/algorithms": (*DATA, "recipes/models", "recipes/training"),
    "recipes/scoring": (*DATA, "recipes/models", "recipes/encoders"),
    "recipes/exports": (*DATA, "recipes/models", "recipes/encoders"),
    "recipes/planning/hardware": (*DATA, "recipes/models"),
    "recipes/planning/tracing": (*SHARED, "recipes/algorithms"),
    "recipes/planning": (*SHARED, "recipes/algorithms", "recipes/planning/hardware", "recipes/planning/tracing"),
    "recipes/checking": (*SHARED, "recipes/algorithms", "recipes/planning", "recipes/planning/hardware"),
    "callbacks": (
        *DATA,
        "recipes/models",
        "recipes/encoders",
        "recipes/training",
        "recipes/algorithms",
        "recipes/scoring",
        "recipes/exports",
        "recipes/planning/hardware",
    ),
    "recipes/generation": SHARED,
    "recipes/evaluation": (*SHARED, "recipes/scoring", "recipes/generation"),
    "recipes/comparison": (*DATA, "recipes/config"),
    "recipes/engines": (*SHARED, "recipes/training", "recipes/algorithms", "recipes/planning"),
    "recipes/exporting": (
        *SHARED,
        "recipes/training",
        "recipes/algorithms",
        "recipes/exports",
        "recipes/generation",
        "recipes/planning",
        "recipes/engines",
    ),
    "precompute/config.py": (*DATA, "recipes/config"),
    "precompute/output": (*DATA, "precompute/config.py"),
    "precompute/encoding": (*PRECOMPUTE, "recipes/encoders"),
    "precompute/texts": PRECOMPUTE,
    "precompute/checking": (*PRECOMPUTE, "precompute/encoding", "recipes/encoders"),
    "precompute/scoring": (*PRECOMPUTE, "precompute/encoding", "recipes/encoders", "recipes/scoring"),
    "precompute": (
        *PRECOMPUTE,
        "precompute/encoding",
        "precompute/texts",
        "precompute/checking",
        "precompute/scoring",
        "recipes/encoders",
        "recipes/scoring",
    ),
    # Entry points.
    "recipes": (
        *SHARED,
        "recipes/training",
        "recipes/algorithms",
        "recipes/scoring",
        "callbacks",
        "recipes/generation",
        "recipes/evaluation",
        "recipes/comparison",
        "recipes/planning",
        "recipes/planning/hardware",
        "recipes/checking",
        "recipes/engines",
        "recipes/exports",
        "recipes/exporting",
    ),
    "cluster": (
        *DATA,
        "recipes/config",
        "recipes/training",
        "recipes/planning",
        "recipes/checking",
        "precompute/config.py",
    ),
    "docs": (*SHARED, "precompute/config.py", "precompute/texts", "recipes/evaluation"),
}
KNOWS_COMPOSER = ("recipes/engines/composer",)
# What is read before a config is known to be right: everything else on import would cost seconds.
LIGHT = (
    "cluster/check.py",
    "cluster/launch.py",
    "cluster/submit.py",
    "data/aliases.py",
    "data/encoded/manifest.py",
    "precompute/config.py",
    "precompute/encode.py",
    "precompute/pack.py",
    "precompute/texts/pack_config.py",
    "precompute/verify.py",
    "precompute/vocabulary.py",
    "recipes/config/build.py",
    "recipes/config/command_line.py",
    "recipes/config/components.py",
    "recipes/config/differences.py",
    "recipes/config/recipe.py",
    "recipes/config/schema.py",
    "recipes/config/values.py",
    "recipes/evaluation/command.py",
    "recipes/evaluation/config.py",
    "recipes/generation/exports.py",
    "recipes/models/autoregressive/family.py",
    "recipes/models/family.py",
    "recipes/models/latent_diffusion/family.py",
    "recipes/train.py",
)
HEAVY = {"torch", "composer", "diffusers", "streaming", "numpy", "open_clip", "transformers", "PIL"}


@functools.cache
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


def room_of(path):
    """The room of a file, by its path from the root."""
    return max((room for room in ARROWS if under(path, [room])), key=len)


def own_imports(file):
    """Files of this repository that a file imports, by their paths from the root."""
    found = set()
    for module in imports(file):
        path = module.replace(".", "/") + ".py"
        if under(module, PACKAGES) and (ROOT / path).is_file():
            found.add(path)
    return found


@pytest.fixture(scope="module")
def graph():
    """A file -> the files that it imports."""
    return {file.relative_to(ROOT).as_posix(): own_imports(file) for file in FILES}


def test_open_clip_is_imported_without_wandb():
    """In one place, which hides wandb; otherwise each process that needs open_clip takes a minute longer to start."""
    summary = importlib.import_module("timm.utils.summary")
    assert not hasattr(summary, "wandb") and data.tokenizers.clip_library.open_clip
    direct = [file.relative_to(ROOT).as_posix() for file in FILES if "open_clip" in imports(file)]
    assert direct == ["data/tokenizers/clip_library.py"]


def test_arrows_between_rooms_run_one_way(graph):
    wrong = [
        f"{path} -> {target}: {room_of(path)} may not import from {room_of(target)}"
        for path, targets in graph.items()
        for target in sorted(targets)
        if room_of(target) not in (room_of(path), *ARROWS[room_of(path)])
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_make_no_circle():
    order = list(ARROWS)
    assert not [(room, other) for room, others in ARROWS.items() for other in others if other not in order]
    done = set()
    while len(done) < len(order):
        free = [room for room in order if room not in done and set(ARROWS[room]) <= done]
        assert free, f"a circle among {set(order) - done}"
        done |= set(free)


def test_files_make_no_circle(graph):
    done, path = set(), []

    def follow(file):
        assert file not in path, "a circle of imports: " + " -> ".join([*path[path.index(file) :], file])
        if file in done:
            return
        path.append(file)
        for target in sorted(graph[file]):
            follow(target)
        done.add(path.pop())

    for file in graph:
        follow(file)


@pytest.mark.parametrize("folder", ["recipes", "benchmarks"])
def test_a_folder_of_commands_holds_nothing_else(folder):
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.py")}
    assert {name for name, text in texts.items() if '__name__ == "__main__"' not in text} == {"__init__.py"}


def test_few_files_know_composer():
    knowing = {
        file.relative_to(ROOT).as_posix() for file in FILES if any(under(m, ["composer"]) for m in imports(file))
    }
    assert "recipes/engines/composer/model.py" in knowing
    assert {path for path in knowing if not under(path, KNOWS_COMPOSER)} == set()


@pytest.mark.parametrize("path", LIGHT)
def test_a_config_is_checked_without_heavy_imports(path):
    assert not [module for module in imports(ROOT / path, only_on_import=True) if under(module, HEAVY)]


def test_dry_runs_do_not_wait_for_diffusers_networks():
    """The levers that ask whether a model is in channels_last are there in every run, and most have no U-Net."""
    imported, left = set(), ["recipes/engines/dry_run_checks.py"]
    while left:
        modules = imports(ROOT / left.pop(), only_on_import=True)
        assert not [module for module in modules if under(module, ["diffusers"])]
        files = {f"{module.replace('.', '/')}.py" for module in modules if under(module, PACKAGES)}
        new = {file for file in files if (ROOT / file).is_file()} - imported
        imported |= new
        left += new
    assert "recipes/algorithms/modules/channels_last.py" in imported


def test_scripts_take_their_own_folder_off_the_path():
    scripts = [file for file in FILES if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    assert len(scripts) >= 4
    for script in scripts:
        body = ast.parse(script.read_text(encoding="utf-8")).body
        own = [n.lineno for n in body if isinstance(n, ast.ImportFrom) and under(n.module, PACKAGES)]
        changes = [n.lineno for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "sys.path[:]"]
        assert changes, f"{script}: its folder stays on the import path"
        assert changes[0] < min(own, default=changes[0] + 1)
