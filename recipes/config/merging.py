"""Merging the values of a YAML with those of its base, and with the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


def merge(below: Any, above: Any) -> Any:
    """Merge `above` into `below`, key by key. Lists, and components with another name, are replaced as a whole.

    Example::

        merge({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})  # {"a": 1, "b": {"c": 2, "d": 3}}
    """
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if "name" in above and "name" in below and above["name"] != below["name"]:
        return dict(above)
    merged = dict(below)
    for key, value in above.items():
        merged[key] = merge(below[key], value) if key in below else value
    return merged


def vain_removals(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> list[str]:
    """A line for each label of a component that `above` sets to null and `below` has not, if it has a similar one.

    Labels are free, so that nothing else finds a misspelled one. One that nothing is similar to may be meant: the same
    null may be given to several recipes.
    """
    lines = []
    labels = [key for key, value in below.items() if isinstance(value, Mapping) and "name" in value]
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            lines += vain_removals(below[key], value, f"{path}{key}.")
        elif value is None and key not in below and len(labels) == len(below):
            close = difflib.get_close_matches(str(key), labels, n=1, cutoff=0.8)
            lines += [f"{path}{key}: null removes nothing; did you mean `{label}`?" for label in close]
    return lines
