"""What a checked config is made of, and its way back to plain values and YAML."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml


class ConfigError(ValueError):
    """Everything wrong with a config, one line each, each starting with the full path of its key."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True)
class Component:
    """A checked, not yet built component. `args` holds plain values and nested Components."""

    group: str
    name: str
    args: dict[str, Any]
    target: str
    path: str


class Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e-4, which the reader of recipes takes for numbers and plain PyYAML does not."""


Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def plain(config: Any) -> Any:
    """A config as the plain values that `recipes.config.recipe.load` would read back."""
    if isinstance(config, Component):
        return {"name": config.name, **{key: plain(value) for key, value in config.args.items()}}
    if dataclasses.is_dataclass(config):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config


def yaml_line(value: Any) -> str:
    """Plain values as YAML on one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def short(value: Any) -> str:
    """A value as a message quotes it, cut to one short line."""
    text = " ".join(yaml_line(value).split()) if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
