"""The keys on which two configs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from recipes.config.schema import read_signature
from recipes.config.values import Component, plain_values

Difference = tuple[str, Any, Any]  # full path of a key, plain value in the first config, plain value in the second


def differences(first: Any, second: Any, path: str = "") -> Iterator[Difference]:
    """The keys whose values differ, the deepest ones that both configs have. Defaults count as given.

    Args:
        first, second: checked configs, or plain values.
        path: of both, in front of their keys.
    """
    one, other = parts_of(first), parts_of(second)
    other_kind = isinstance(first, Component) and isinstance(second, Component) and first.name != second.name
    if one is None or other is None or other_kind:
        if plain_values(first) != plain_values(second):
            yield path, plain_values(first), plain_values(second)
        return
    for key in [*one, *(key for key in other if key not in one)]:
        yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)


def value_at(config: Any, path: str) -> Any:
    """The plain value of a key by its full path, which may be a default; None if the config has no such key."""
    for key in path.split("."):
        config = (parts_of(config) or {}).get(key)
    return plain_values(config)


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """The parts of a value of a config by their names, defaults included, or of a list with components by their places;
    None for plain values."""
    if isinstance(value, Component):
        return {"name": value.name} | defaults_of(value) | value.args
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list) and any(isinstance(item, Component) for item in value):
        return {str(place): item for place, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def defaults_of(component: Component) -> dict[str, Any]:
    """The present defaults of a component's keys."""
    parameters = read_signature(component.target).parameters.values()
    return {p.name: yaml.safe_load(p.default) for p in parameters if not p.required}


def components_in(config: Any) -> Iterator[Component]:
    """The components of a config, nested ones too."""
    if isinstance(config, Component):
        yield config
    for part in (parts_of(config) or {}).values():
        yield from components_in(part)
