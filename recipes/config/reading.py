"""The values of a YAML with those of its base and of `key=value` overrides, before they are checked."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException, UnsupportedInterpolationType

from recipes.config.scalars import load
from recipes.config.source_code import ROOT
from recipes.config.values import ConfigError

MARK = re.compile(r'in "<(byte|unicode) string>", line')  # of PyYAML, which is given no file
CUTS = re.compile(r"[#\r\n\x85\u2028\u2029]")  # what begins a comment in YAML, and its line breaks
MAX_DEPTH = 500  # of values in each other in a YAML
MAX_VALUES = 100_000  # of a YAML, once its aliases are replaced by what they stand for

# A recipe of somebody else must not put a credential into an address, and one's own is written to records and logs.
OmegaConf.clear_resolver("oc.env")


def read_values(path: str | Path, overrides: list[str], labels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values of a YAML with its base and overrides, interpolations resolved, before they are checked.

    Args:
        path: the YAML.
        overrides: texts of the form `key.sub=value`.
        labels: for keys whose values have labels, the labels that hold where the YAML has no such key. An override of
            one label, such as `loggers.wandb={...}`, adds to them.

    Raises:
        ConfigError: a file that is not a YAML of keys and values, or an interpolation that cannot be resolved. If the
            disk does not give a file, the cause is an OSError.
    """
    values = _read(Path(path))
    for key, default in (labels or {}).items():
        if key not in values and any(override.startswith(f"{key}.") for override in overrides):
            values = {**values, key: default}
    given = _parse(overrides)
    if lines := _empty_overrides(values, given):
        raise ConfigError(lines)
    values = _merged(values, given)
    if not _has_interpolations(values):
        return _copied(values)  # nine tenths of the time of reading a recipe would be OmegaConf's
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError([_one_line(error, str(path))]) from None


def _has_interpolations(values: Any) -> bool:
    """Whether OmegaConf would change any text, which may also escape an interpolation."""
    if isinstance(values, dict):
        return any(map(_has_interpolations, values.values()))
    if isinstance(values, list):
        return any(map(_has_interpolations, values))
    return isinstance(values, str) and "${" in values


def _copied(values: Any) -> Any:
    """Values of whose dicts and lists none is shared."""
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else values


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML over those of its `base`, a path from its folder or from `~`. Interpolations stay."""
    named = f" (the base of {seen[-1].name})" if seen else ""
    try:
        if path.is_dir():
            raise ConfigError([f"{path}: a folder{named}; give a YAML file"])
        if not path.is_file():
            raise ConfigError([f"{path}: no such YAML file{named}{_similar_file(path)}"])
        text = path.read_bytes()
    except OSError as error:  # which says nothing of what is in the file
        raise ConfigError([f"{path}: cannot be read ({error.strerror}){named}"]) from error
    if path.resolve() in seen:
        raise ConfigError([f"{path}: is its own base, through {', '.join(file.name for file in seen)}"])
    try:
        values = _values(text)
    except Exception as error:  # for values with tags, PyYAML raises nearly anything
        raise ConfigError([f"{path}: not readable as YAML: {_one_line(error)}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: expected keys and values at the top level"])
    if "base" not in values:
        return values
    values = dict(values)
    base = values.pop("base")
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError([f"{path}: base: expected the path of a YAML, from this one's folder, got {base!r}"])
    return _merged(_read(path.parent / os.path.expanduser(base), (*seen, path.resolve())), values)


@functools.lru_cache  # a plan, and a table of settings, read a few files dozens of times, 10 ms each
def _values(text: bytes) -> Any:
    """What a YAML says, interpolations as they are. The result is shared: it must not be changed."""
    _check_size(text)
    return OmegaConf.to_container(OmegaConf.create(load(text) or {}), resolve=False)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """As `merge`. Raises ConfigError for a label that is misspelled where it is to be removed."""
    if lines := _misspelled_removals(below, above):
        raise ConfigError(lines)
    return merge(below, above)


def _check_size(text: bytes) -> None:
    """Raises ValueError where values are nested deeper than `MAX_DEPTH`, or aliases (`*name`) stand for more than
    `MAX_VALUES` values, or for themselves."""
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):  # what builds values of deeper ones ends the process by a signal
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
    sizes: dict[int, float] = {}

    def size(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # while its own values are counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            inner = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    if b"*" in text and b"&" in text and (tree := yaml.compose(text, yaml.SafeLoader)) and size(tree) > MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")


def _similar_file(path: Path) -> str:
    """A hint for a YAML that does not exist: one with a similar name, in yamls/ or in the same folder."""
    files = {file.name: file for folder in (ROOT / "yamls", path.parent) for file in folder.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, [Path(name).stem for name in files], n=1)
    return f"; did you mean {files[f'{close[0]}.yaml']}?" if close else ""


def _parse(overrides: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    errors = []
    for override in overrides:
        if "=" not in override or override.startswith(("-", "=")):
            errors.append(f"{override}: expected key=value on the command line (or --help, --dry-run, --print-config)")
            continue
        try:
            values = merge(values, _given(override))
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # of bytes that are not UTF-8, too
            errors.append(f"{override}: not readable as YAML: {_one_line(error)}")
        except RecursionError as error:
            errors.append(_one_line(error, override.split("=", 1)[0]))
    if errors:
        raise ConfigError(errors)
    return values


@functools.lru_cache(1024)  # as `_values`; a table of settings gives most overrides dozens of times
def _given(override: str) -> dict[str, Any]:
    """The values of one override. The result is shared: it must not be changed."""
    key, text = override.split("=", 1)
    given = OmegaConf.create()
    OmegaConf.update(given, key, text.strip() if _is_cut(text) else load(text))
    return OmegaConf.to_container(given, resolve=False)


def _is_cut(text: str) -> bool:
    """Whether YAML takes a part of a text without quotes for a comment, or its line breaks for spaces. On a command
    line there are neither: `output=runs/mine #2` was the folder of another run, runs/mine."""
    if not CUTS.search(text.strip()) or text.lstrip().startswith(("!", "&", "---")):
        return False
    tree = yaml.compose(text, yaml.CSafeLoader)
    return tree is None or (isinstance(tree, yaml.ScalarNode) and not tree.style and tree.value != text.strip())


def _one_line(error: Exception, where: str = "") -> str:
    """An error of OmegaConf or PyYAML as one line that begins with the key in question."""
    if isinstance(error, RecursionError):
        return f"{where}: nested too deeply".removeprefix(": ")
    key = getattr(error, "full_key", None) or where
    text = " ".join(str(error).split("\n    full_key")[0].split())
    text = MARK.sub("at line", text)
    if isinstance(error, GrammarParseError):
        text += r"; a text that contains ${ is written \${"
    if isinstance(error, UnsupportedInterpolationType):
        text += "; give the value itself"
    return f"{key}: {text}" if key else text


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


def _empty_overrides(below: Mapping[str, Any], given: Mapping[str, Any], path: str = "") -> list[str]:
    """A line for each `{}` that is given where `below` has labels of components, none of which it removes."""
    lines = []
    for key, value in given.items():
        inner = below.get(key)
        if not isinstance(value, Mapping) or not isinstance(inner, Mapping):
            continue
        lines += _empty_overrides(inner, value, f"{path}{key}.")
        labels = [label for label, one in inner.items() if isinstance(one, Mapping) and "name" in one]
        if not value and labels and len(labels) == len(inner):
            give = " ".join(f"{path}{key}.{label}=null" for label in labels)
            lines.append(f"{path}{key}: {{}} removes nothing; give {give}")
    return lines


def _misspelled_removals(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> list[str]:
    """A line for each label of a component that `above` sets to null and `below` has not, if it has a similar one.

    Labels are free, so that nothing else finds a misspelled one. One that nothing is similar to may be meant: the same
    null may be given to several recipes.
    """
    lines = []
    labels = [key for key, value in below.items() if isinstance(value, Mapping) and "name" in value]
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            lines += _misspelled_removals(below[key], value, f"{path}{key}.")
        elif value is None and key not in below and len(labels) == len(below):
            close = difflib.get_close_matches(str(key), labels, n=1, cutoff=0.8)
            lines += [f"{path}{key}: null removes nothing; did you mean `{label}`?" for label in close]
    return lines
