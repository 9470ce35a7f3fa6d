"""Components of other packages that are installed in this environment.

A package lists them as entry points of the group `precompose.GROUP`, and a recipe names them `PACKAGE.NAME`; no name of
this repository has a dot. Nothing else is ever imported because a YAML file or an export says so: who sends a recipe
can choose among what is installed, and cannot add to it.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from recipes.config.components import COMPONENTS
from recipes.config.schema import nearest
from recipes.config.values import ConfigError

PREFIX = "precompose."


def all_components() -> dict[str, dict[str, str]]:
    """The table of components with those of installed packages. None of them is imported.

    Raises:
        ConfigError: a package names a group that does not exist.
    """
    table = {group: dict(names) for group, names in COMPONENTS.items()}
    for entry in _entries():
        group = entry.group.removeprefix(PREFIX)
        if group not in table:
            raise ConfigError(
                [f"{entry.dist.name}: entry points {entry.group}: no group of components; {nearest(group, table)}"]
            )
        table[group][f"{entry.dist.name}.{entry.name}"] = f"{entry.module}:{entry.attr}"
    return table


def packages() -> set[str]:
    """The top-level modules of these packages."""
    return {entry.module.split(".")[0] for entry in _entries()}


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    found = entry_points()
    groups = sorted(group for group in found.groups if group.startswith(PREFIX))
    return tuple(entry for group in groups for entry in found.select(group=group))
