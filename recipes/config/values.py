"""The parts of a checked config, and their conversion back to plain values and YAML."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml


class ConfigError(ValueError):
    """All mistakes in a config, one line each, each of which begins with the full path of its key."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True)
class Component:
    """A component that has been checked and not yet built.

    Attributes:
        group: kind of component, such as "optimizer".
        name: its name in the group, such as "adamw".
        args: the arguments that the config gives: plain values and nested components.
        target: its builder, as "module:callable".
        path: the full path of its key in the config, for messages.
    """

    group: str
    name: str
    args: dict[str, Any]
    target: str
    path: str


class Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e-4, which OmegaConf reads as numbers and PyYAML does not.

    Texts with Unicode's line breaks are in double quotes, which escape them; between other quotes PyYAML reads U+0085,
    which it wrote itself, as a space.
    """


def _text(dumper: Dumper, value: str) -> yaml.ScalarNode:
    style = '"' if re.search("[\x85\u2028\u2029]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


Dumper.add_representer(str, _text)
Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def plain_values(config: Any) -> Any:
    """A config as dicts, lists and scalars, which `recipes.config.recipe.load_config` would read back from a YAML."""
    if isinstance(config, Component):
        return {"name": config.name, **{key: plain_values(value) for key, value in config.args.items()}}
    if dataclasses.is_dataclass(config):
        return {f.name: plain_values(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: plain_values(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain_values(value) for value in config]
    return config


def yaml_line(value: Any) -> str:
    """Dicts, lists and scalars as YAML on one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def quoted(value: Any) -> str:
    """A value as messages quote it: on one line of at most 60 characters."""
    text = " ".join(yaml_line(value).split()) if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
