"""YAML whose values without quotes keep their spelling, so that a text field holds what the user typed.

YAML itself takes `0123` for 83, `yes` for true, `12:30:00` for 45000 and `1e3` for 1000.0, and forgets how they were
written. Here a value is a number or a boolean only if it is written as Python would write it. Other spellings are
texts, which fields for numbers and booleans read (`value_of`).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

INTEGER = re.compile(r"[-+]?(0|[1-9]\d*(_\d+)*)", re.ASCII)
FLOAT = re.compile(r"[-+]?((\d+(_\d+)*)?\.\d+|\d+(_\d+)*\.?)([eE][-+]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
LEADING_ZERO = re.compile(r"[-+]?0[\d_]+", re.ASCII)  # octal in YAML 1.1, decimal in YAML 1.2
BOOLEANS = {
    **{form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())},
    **{form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())},
}


def value_of(text: str) -> bool | int | float | str:
    """The number or boolean that a text spells, or else the text: "1e3" -> 1000.0, "yes" -> True, "0123" -> "0123"."""
    if text in BOOLEANS:
        return BOOLEANS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and not LEADING_ZERO.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if NOT_FINITE.fullmatch(text) else text


def text_of(value: bool | int | float | str) -> str:
    """The one spelling by which `load` reads a value as what it is."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_spelled(value: bool | int | float | str, text: str) -> bool:
    """Whether `load` reads a text without quotes as this value. A text for which this holds was in quotes."""
    return text_of(value) == text


def load(text: str | bytes) -> Any:
    """Read YAML. Raises yaml.YAMLError, also for a key that is given twice."""
    return yaml.load(text, Loader)  # derived from the safe loader


class Loader(yaml.CSafeLoader):
    """Scalars keep their spelling; see the module."""

    yaml_implicit_resolvers: dict = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, times in keys.items():
            if times > 1 and key != "<<":
                where = "while constructing a mapping", node.start_mark
                raise yaml.constructor.ConstructorError(*where, f"found duplicate key {key}", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_plain(self, node: yaml.ScalarNode) -> bool | int | float | str:
        text = self.construct_scalar(node)
        value = value_of(text)
        return value if is_spelled(value, text) else text


Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<$"), ["<"])
Loader.add_implicit_resolver("!plain", re.compile("."), None)
Loader.add_constructor("!plain", Loader.construct_plain)
