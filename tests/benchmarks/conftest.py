"""Components that benchmarks add to the registry leave it again."""

import pytest

from recipes.config.components import COMPONENTS


@pytest.fixture(autouse=True)
def own_components():
    kept = {group: dict(names) for group, names in COMPONENTS.items()}
    yield
    for group, names in kept.items():
        COMPONENTS[group].clear()
        COMPONENTS[group].update(names)
