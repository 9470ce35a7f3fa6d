"""Components that benchmarks add to the registry leave it again; the steps of gpu.py, made once."""

import functools

import pytest

from benchmarks import gpu
from recipes.config.components import COMPONENTS


@pytest.fixture(autouse=True)
def own_components():
    kept = {group: dict(names) for group, names in COMPONENTS.items()}
    yield
    for group, names in kept.items():
        COMPONENTS[group].clear()
        COMPONENTS[group].update(names)


@pytest.fixture(scope="session")
def items():
    """small -> the steps of gpu.py, whose names take a second: each change of each recipe is read."""
    return functools.cache(gpu.items)


@pytest.fixture
def unprepared(items, monkeypatch):
    """gpu.py in this process: its variables stay as they are."""
    monkeypatch.setattr(gpu, "items", items)
    monkeypatch.setattr(gpu, "prepare", lambda options: None)
