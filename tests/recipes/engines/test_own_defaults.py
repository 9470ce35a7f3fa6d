"""Defaults of components of other packages, which are not in the recipe of a run that goes on."""

from types import SimpleNamespace

import pytest

from recipes.config import entry_points, schema, source_code
from recipes.engines.record import DEFAULTS, check_copy, check_record, keep_record, keep_with

LEVER = """
from typing import Annotated, Any

from recipes.training.lever import Lever


class Mine(Lever):
    def __init__(self, *, {keys}) -> None:
        pass

    def before_step(self, run):
        pass


class Several(Mine):
    def __init__(self, *, levers: list[Annotated[Any, "algorithm"]]) -> None:
        pass
"""
DATA = SimpleNamespace(manifest=None, samples=None, vocabulary=None)


@pytest.fixture
def of_keys(tmp_path, monkeypatch):
    """Installs a package of a lever whose constructor has some keys."""
    packages = tmp_path / "packages"
    info = packages / "of_defaults-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-defaults\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[precompose.algorithm]\nmine = of_defaults:Mine\nseveral = of_defaults:Several\n"
    )
    monkeypatch.syspath_prepend(packages)

    def clear():  # each is what one process finds
        for value in (value for module in (entry_points, schema, source_code) for value in vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()

    def write(keys):
        (packages / "of_defaults.py").write_text(LEVER.replace("{keys}", keys))
        clear()

    yield write
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize(
    ("now", "given", "refused"),
    [
        ("rate: float = 0.2, sign: bool = True", "", True),
        ("rate: float = 0.2, sign: bool = True", "rate: 0.1", False),  # what it was
        ("rate: float = 0.1, sign: bool = True, other: int = 3", "", False),
        ("rate: float = 0.1", "", False),
    ],
    ids=["changed", "given", "added", "removed"],
)
def test_a_default_that_has_changed_since_is_a_change(of_keys, quick_recipe, tmp_path, now, given, refused):
    """The run went on with the other one, and nothing said so."""
    output, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "ep0-ba3-rank0.pt"
    bucket = "checkpoints.bucket=s3://a/run"

    def recipe(given="", *more):
        mine = f"algorithms.mine={{name: of-defaults.mine{given and ', '}{given}}}"
        return quick_recipe(output, "checkpoints.autoresume=true", bucket, mine, *more)

    of_keys("rate: float = 0.1, sign: bool = True")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    keep_record(recipe(), DATA)
    keep_with(output, checkpoint)
    texts = {file.name: file.read_text() for file in (output / "records" / "ep0-ba3").iterdir()}
    of_keys(now)
    keep_record(recipe(given), DATA)  # of a start that saved nothing
    for check in (check_record, lambda recipe: check_copy(recipe, texts)):
        if not refused:
            check(recipe(given))
            continue
        with pytest.raises(ValueError, match=r"begun with: algorithms.mine.rate was 0.1, is 0.2; give another"):
            check(recipe(given))
        check(recipe(given, "checkpoints.allow_changes=[algorithms.mine.rate]"))
    (output / "records" / "ep0-ba3" / DEFAULTS).unlink()  # of an earlier version
    check_record(recipe())


def test_components_in_lists_have_defaults_too(of_keys, quick_recipe, tmp_path):
    """They were not in the record, so that a run went on with other ones."""
    output, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "ep0-ba3-rank0.pt"

    def recipe(*levers):
        listed = ", ".join(f"{{name: of-defaults.mine, {keys}}}" for keys in levers)
        mine = f"algorithms.mine={{name: of-defaults.several, levers: [{listed}]}}"
        return quick_recipe(output, "checkpoints.autoresume=true", mine)

    of_keys("rate: float = 0.1, sign: bool = True")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    keep_record(recipe("", "rate: 0.5"), DATA)
    keep_with(output, checkpoint)
    assert check_record(recipe("", "rate: 0.5")) == []
    of_keys("rate: float = 0.2, sign: bool = True, other: int = 3")
    assert check_record(recipe("rate: 0.1", "rate: 0.5")) == []
    with pytest.raises(ValueError, match=r"begun with: algorithms.mine.levers.0.rate was 0.1, is 0.2; give another"):
        check_record(recipe("", "rate: 0.5"))
    with pytest.raises(ValueError, match=r"begun with: algorithms.mine.levers.1 was {name: .*}, is None; give another"):
        check_record(recipe("rate: 0.1"))
    for key in ("algorithms.mine.levers.0.rate", "algorithms.mine.levers"):
        changed = recipe("", "rate: 0.5")
        changed.checkpoints.allow_changes.append(key)
        assert check_record(changed) == ["algorithms.mine.levers.0.rate"]
        quick_recipe(output, f"checkpoints.allow_changes=[{key}]")  # the key is one
