"""The keys that a YAML may contain, read from the source of the code that it configures.

A component is written `{name: x, argument: value, ...}`. The keyword-only parameters of its builder are the allowed
keys. They are read with `ast`, without importing the builder, so that a misspelled key is reported in a fraction of a
second: importing torch and a trainer takes many seconds. Fixed sections are dataclasses and follow the same rules.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recipes.config.scalars import is_spelled, text_of, value_of
from recipes.config.source_code import module_tree, source_file
from recipes.config.values import Component, ConfigError, plain_values, quoted, yaml_line

LARGEST_FLOAT = 3.4e38  # of 32 bits, with which models and optimizers compute
DURATION = re.compile(r"\d+(ba|ep|sp)|(\d+(\.\d*)?|\.\d+)dur")
WEIGHTS = (".ckpt", ".pt", ".pth", ".safetensors")  # suffixes of files
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Types that are strings of a certain form, by the names that messages and docs use.
ALIASES = {"Duration": "duration", "InputPath": "existing path", "ModelPath": "existing path or hub id"}
NAMES = {"int", "float", "str", "bool", "Any", *ALIASES}


@dataclass(frozen=True)
class Parameter:
    """One key of a component or of a section."""

    name: str
    annotation: ast.expr
    required: bool
    default: str
    """As YAML on one line; empty if the key is required."""
    doc: str

    @property
    def type_text(self) -> str:
        return type_text(self.annotation)

    @property
    def allows_null(self) -> bool:
        return _allows_null(_alternatives(self.annotation))


@dataclass(frozen=True)
class Signature:
    """The keys that a builder takes from a YAML, and the first paragraph of its docstring."""

    parameters: dict[str, Parameter]
    doc: str


def is_hub_id(text: str) -> bool:
    """Whether a text may name a model of the hub. The folder of a run and a file of weights have the same form."""
    path = PurePosixPath(text)
    return HUB_ID.fullmatch(text) is not None and path.parts[0] != "runs" and path.suffix not in WEIGHTS


def nearest(word: Any, allowed: Iterable[str]) -> str:
    """A hint for an unknown name: the most similar allowed name, or all allowed names if none is similar."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(str(word), allowed, n=1, cutoff=0.55)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"allowed: {', '.join(allowed)}" if allowed else "nothing is allowed here"


def missing_package(name: Any) -> str:
    """The beginning of a hint for the unknown name of a component, if it is one of a package (`PACKAGE.NAME`)."""
    if not isinstance(name, str) or "." not in name:
        return ""
    return f"no package {quoted(name.partition('.')[0])} that has it is installed; "


# --- reading signatures --------------------------------------------------------------------------------------------


def _argument_docs(doc: str) -> dict[str, str]:
    """The `Args:` section of a Google-style docstring, as one line per argument."""
    docs: dict[str, str] = {}
    inside, current = False, None
    for line in doc.splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line.strip() and not line.startswith(" "):
            break
        elif inside and (match := re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line)):
            current = match[1]
            docs[current] = match[2].strip()
        elif inside and current and line.strip():
            docs[current] += " " + line.strip()
    return docs


def _first_paragraph(doc: str) -> str:
    return " ".join(doc.strip().split("\n\n")[0].split())


@functools.cache
def read_signature(target: str) -> Signature:
    """The keyword-only parameters of "module:callable", a function or a class, without importing it.

    Raises:
        ConfigError: there is no such builder, or it breaks the rules of docs/extending.md.
    """
    module, _, name = target.partition(":")
    body = module_tree(module).body
    found = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    if name not in found:
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        if any(name == (alias.asname or alias.name) for node in imports for alias in node.names):
            what = f"`{name}` is imported there; name the module that defines it"
            raise ConfigError([f"{source_file(module)}: {what}"])
        raise ConfigError([f"{source_file(module)}: no function or class `{name}`; {nearest(name, found)}"])
    node = found[name]
    doc = ast.get_docstring(node) or ""
    function = node
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if function is None:
            raise ConfigError([f"{source_file(module)}: {name} has no __init__ of its own, which lists its keys"])
        doc = doc + "\n\n" + (ast.get_docstring(function) or "")
    docs = _argument_docs(doc)
    parameters = {}
    for arg, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if arg.annotation is None:
            raise ConfigError([f"{source_file(module)}: {name}: the key `{arg.arg}` has no type"])
        if not _is_type(arg.annotation):
            what = f"the key `{arg.arg}` has the type `{_source(arg.annotation)}`, which no key can have"
            raise ConfigError([f"{source_file(module)}: {name}: {what}; docs/extending.md lists the types"])
        try:
            text = "" if default is None else yaml_line(plain_values(ast.literal_eval(default)))
        except ValueError:
            raise ConfigError([f"{source_file(module)}: {name}: the default of `{arg.arg}` is no literal"]) from None
        parameters[arg.arg] = Parameter(arg.arg, arg.annotation, default is None, text, docs.get(arg.arg, ""))
    return Signature(parameters, _first_paragraph(doc))


def readable_keys(target: str) -> dict[str, Parameter]:
    """The keys of a builder for lists of many, such as hints; none if the builder breaks the rules, which only a config
    that uses it is told: it may be of a package that this config has nothing to do with."""
    try:
        return read_signature(target).parameters
    except ConfigError:
        return {}


@functools.cache
def read_section(section: type) -> Signature:
    """The fields of a dataclass as parameters. The string literal below a field is its documentation."""
    tree = module_tree(section.__module__)
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == section.__name__)
    docs: dict[str, str] = {}
    for field, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(following.value)).split())
    parameters = {}
    for field in dataclasses.fields(section):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "" if required else yaml_line(plain_values(_default(field)))
        annotation = ast.parse(str(field.type), mode="eval").body
        parameters[field.name] = Parameter(field.name, annotation, required, default, docs.get(field.name, ""))
    return Signature(parameters, _first_paragraph(section.__doc__ or ""))


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


@functools.cache
def subsections(section: type) -> dict[str, type]:
    """The fields that are sections themselves, those that may be null included: key -> dataclass."""
    namespace = vars(sys.modules[section.__module__])
    found = {}
    for name, parameter in read_section(section).parameters.items():
        for option in _alternatives(parameter.annotation):
            if dataclasses.is_dataclass(inner := namespace.get(_source(option))):
                found[name] = inner
    return found


# --- types ---------------------------------------------------------------------------------------------------------

# Turning nodes back into source took most of the time of a check. Nodes are told apart by their identity; annotations
# stay in the caches of signatures anyway.
_source = functools.cache(ast.unparse)


@functools.cache
def type_text(annotation: ast.expr) -> str:
    """A type as messages and docs show it. A component is named by its group: "optimizer component"."""
    if isinstance(annotation, ast.BinOp):
        return f"{type_text(annotation.left)} | {type_text(annotation.right)}"
    if isinstance(annotation, ast.Subscript):
        base, inner = _source(annotation.value), annotation.slice
        if base == "Annotated":
            return f"{ast.literal_eval(inner.elts[1])} component"
        if base == "Literal":
            return " | ".join(f'"{v}"' if isinstance(v, str) else yaml_line(v) for v in _literals(inner))
        return f"{base}[{', '.join(type_text(part) for part in _elements(inner))}]"
    if isinstance(annotation, ast.Constant):
        return {None: "null", ...: "..."}[annotation.value]
    return ALIASES.get(_source(annotation), _source(annotation))


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _literals(node: ast.expr) -> list[Any]:
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else [value]


def _alternatives(annotation: ast.expr) -> list[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        return _alternatives(annotation.left) + _alternatives(annotation.right)
    return [annotation]


def _is_type(annotation: ast.expr) -> bool:
    """Whether it is one of the types that docs/extending.md lists."""
    return all(map(_is_option, _alternatives(annotation)))


def _is_option(option: ast.expr) -> bool:
    if not isinstance(option, ast.Subscript):
        return _source(option) in NAMES | {"None"}
    base, parts = _source(option.value), _elements(option.slice)
    if base == "Literal":
        return all(isinstance(part, ast.Constant | ast.UnaryOp) for part in parts)
    if base == "Annotated":
        return len(parts) == 2 and isinstance(parts[1], ast.Constant) and isinstance(parts[1].value, str)
    if base == "dict":
        return len(parts) == 2 and _source(parts[0]) == "str" and _is_type(parts[1])
    if base == "tuple" and len(parts) == 2 and _source(parts[1]) == "...":
        parts = parts[:1]
    return base in ("list", "tuple") and (len(parts) == 1 or base == "tuple") and all(map(_is_type, parts))


def _allows_null(options: list[ast.expr]) -> bool:
    return any(_source(option) in ("None", "Any") for option in options)


class Checker:
    """Checks values against annotations. All errors are collected, instead of stopping at the first.

    Args:
        components: group -> name -> "module:callable".
    """

    def __init__(self, components: Mapping[str, Mapping[str, str]]) -> None:
        self.components = components
        self.errors: list[str] = []
        self.missing: list[str] = []  # paths that do not exist, which a dry run does not treat as errors

    def fail(self, path: str, message: str) -> None:
        self.errors.append(f"{path}: {message}")

    def section(self, cls: type, values: Any, path: str) -> Any:
        """An instance of the dataclass `cls`; None if there are errors, which are recorded."""
        parameters = read_section(cls).parameters
        if not isinstance(values, Mapping):
            self.fail(path or cls.__name__, f"takes keys ({', '.join(parameters)}), got {quoted(values)}")
            return None
        # A key at the wrong level, such as `global_batch` at the top, gets the hint `training.global_batch`.
        below = {f: f"{name}.{f}" for name, inner in subsections(cls).items() for f in read_section(inner).parameters}
        checked = self._keys(parameters, values, path, "", vars(sys.modules[cls.__module__]), below)
        if checked is None:
            return None
        try:
            return cls(**checked)
        except ConfigError as error:
            self.errors += [f"{path}.{line}" if path else line for line in error.lines]
            return None

    def component(self, group: str, value: Any, path: str) -> Component | None:
        """A component of `group`, with its arguments checked; None if there are errors, which are recorded."""
        builders = self.components[group]
        if not isinstance(value, Mapping):
            hint = nearest(value if isinstance(value, str) else "", builders)
            self.fail(path, f"got {quoted(value)}; a {group} component is written {{name: ..., arguments}}; {hint}")
            return None
        if "name" not in value:
            close = difflib.get_close_matches("name", [str(key) for key in value], n=1, cutoff=0.7)
            if close:
                self.fail(f"{path}.{close[0]}", f"unknown key of a {group} component; did you mean `name`?")
            else:
                self.fail(f"{path}.name", f"missing; {nearest('', builders)}")
            return None
        name = value["name"]
        if not isinstance(name, str) or name not in builders:
            hint = missing_package(name) + nearest(name, builders)
            self.fail(f"{path}.name", f"unknown {group} {quoted(name)}; {hint}")
            return None
        args = {key: item for key, item in value.items() if key != "name"}
        try:
            parameters = read_signature(builders[name]).parameters
        except ConfigError as error:
            self.fail(f"{path}.name", f"{group} `{name}` is {builders[name]}, which cannot be used: {error}")
            return None
        for parameter in parameters.values():
            for inner in re.findall(r"(\w+) component", parameter.type_text):
                if inner not in self.components:
                    what = f"its key `{parameter.name}` is of the group `{inner}`; {nearest(inner, self.components)}"
                    self.fail(f"{path}.name", f"{group} `{name}` is {builders[name]}, which cannot be used: {what}")
                    return None
        checked = self._keys(parameters, args, path, f" of {group} `{name}`", {}, self._nested_keys(parameters))
        return None if checked is None else Component(group, name, checked, builders[name], path)

    def _nested_keys(self, parameters: Mapping[str, Parameter]) -> dict[str, str]:
        """Keys of the components that a component holds: `prediction` -> `objective.prediction`."""
        groups = {name: re.fullmatch(r"(\w+) component", p.type_text) for name, p in parameters.items()}
        return {
            key: f"{name}.{key}"
            for name, match in groups.items()
            if match
            for target in self.components[match[1]].values()
            for key in readable_keys(target)
        }

    def _keys(
        self,
        parameters: Mapping[str, Parameter],
        values: Mapping,
        path: str,
        owner: str,
        namespace: Mapping[str, Any],
        below: Mapping[str, str],
    ) -> dict[str, Any] | None:
        before = len(self.errors)
        checked = {}
        prefix = f"{path}." if path else ""
        for key, value in values.items():
            if key in parameters:
                checked[key] = self.value(parameters[key].annotation, value, f"{prefix}{key}", namespace)
                continue
            hint = f"did you mean `{prefix}{below[key]}`?" if key in below else nearest(key, parameters)
            self.fail(f"{prefix}{key}", f"unknown key{owner}; {hint}")
        for key, parameter in parameters.items():
            if parameter.required and key not in values:
                self.fail(f"{prefix}{key}", f"missing{owner}; expected {parameter.type_text}")
        return checked if len(self.errors) == before else None

    def value(self, annotation: ast.expr, value: Any, path: str, namespace: Mapping[str, Any]) -> Any:
        """`value` converted to the annotated type (1e3 to an int if an int is expected), and checked."""
        options = _alternatives(annotation)
        if value is None:
            if not _allows_null(options):
                labels = any(_source(option).startswith("dict[") for option in options)
                hint = f"; to leave out one of its entries, set {path}.LABEL to null" if labels else ""
                self.fail(path, f"expected {type_text(annotation)}, got null{hint}")
            return None
        attempts = []
        for option in options:
            attempt = Checker(self.components)
            result = attempt._one(option, value, path, namespace)
            if not attempt.errors:
                self.missing += attempt.missing
                return result
            attempts.append(attempt.errors)
        # Some errors say more than "expected A": which key of a component is wrong, or which literal is similar.
        inner = [errors for errors in attempts if not errors[0].startswith(f"{path}: expected")]
        self.errors += inner[0] if inner else [f"{path}: expected {type_text(annotation)}, got {quoted(value)}"]
        return None

    def _one(self, option: ast.expr, value: Any, path: str, namespace: Mapping[str, Any]) -> Any:
        if isinstance(option, ast.Subscript):
            return self._subscript(option, value, path, namespace)
        name = _source(option)
        if dataclasses.is_dataclass(namespace.get(name)):
            return self.section(namespace[name], value, path)
        return self._scalar(name, value, path)

    def _subscript(self, option: ast.Subscript, value: Any, path: str, namespace: Mapping[str, Any]) -> Any:
        base, inner = _source(option.value), option.slice
        if base == "Annotated":
            return self.component(ast.literal_eval(inner.elts[1]), value, path)
        if base == "Literal":
            return self._literal(_literals(inner), value, path)
        if base == "list" and isinstance(value, list | tuple):
            return [self.value(inner, item, f"{path}.{i}", namespace) for i, item in enumerate(value)]
        if base == "tuple" and isinstance(value, list | tuple):
            kinds = _elements(inner)
            if type_text(kinds[-1]) == "...":
                kinds = kinds[:1] * len(value)
            if len(kinds) == len(value):
                pairs = zip(kinds, value, strict=True)
                return tuple(self.value(kind, item, f"{path}.{i}", namespace) for i, (kind, item) in enumerate(pairs))
        if base == "dict" and isinstance(value, Mapping):
            kind = inner.elts[1]
            # A label set to null removes an entry of the base recipe.
            kept = {k: v for k, v in value.items() if v is not None or _allows_null(_alternatives(kind))}
            return {str(k): self.value(kind, v, f"{path}.{k}", namespace) for k, v in kept.items()}
        self.fail(path, f"expected {type_text(option)}")
        return None

    def _literal(self, allowed: list[Any], value: Any, path: str) -> Any:
        if any(type(item) is type(value) and item == value for item in allowed):
            return value
        texts = [item for item in allowed if isinstance(item, str)]
        close = isinstance(value, str) and difflib.get_close_matches(value, texts, n=1, cutoff=0.5)
        self.fail(path, f"got {value!r}; did you mean `{close[0]}`?" if close else "expected one of its literals")
        return None

    def _scalar(self, kind: str, value: Any, path: str) -> Any:
        given = value
        if kind in ("str", "Duration", "InputPath", "ModelPath"):
            value = text_of(value) if isinstance(value, bool | int | float) else value
        elif isinstance(value, str) and not is_spelled(value_of(value), value):
            value = value_of(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "Any":  # what it holds is read alike at every depth
            if isinstance(value, Mapping):
                return {str(key): self._scalar(kind, item, path) for key, item in value.items()}
            return [self._scalar(kind, item, path) for item in value] if isinstance(value, list | tuple) else value
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "int" and number and (isinstance(value, int) or value.is_integer()):
            return int(value)
        if kind == "float" and number:
            if not abs(value) <= LARGEST_FLOAT:  # nor is NaN
                self.fail(path, f"got {quoted(value)}; give a finite number, at most {LARGEST_FLOAT:g}")
                return None
            return float(value)
        if kind == "str" and isinstance(value, str):
            return value
        if kind == "Duration" and isinstance(value, str):
            if not DURATION.fullmatch(value):
                units = "a whole number of ba, ep or sp, such as 500ba, or a share of the run, such as 0.5dur"
                self.fail(path, f"{quoted(given)} is not a duration; give {units}")
            return value
        if kind in ("InputPath", "ModelPath") and isinstance(value, str):
            return self._input(kind, value, path)
        self.fail(path, f"expected {kind}")
        return None

    def _input(self, kind: str, value: str, path: str) -> str:
        if "://" in value:
            return value
        local = os.path.expanduser(value)
        try:
            there = bool(local) and Path(local).exists()
        except OSError as error:  # os.path.exists would say no of what the disk does not give
            self.missing.append(f"{path}: `{value}` cannot be read ({error.strerror})")
            return local
        if not there and not (kind == "ModelPath" and is_hub_id(value)):
            also = ", and it is no hub id (owner/name)" if kind == "ModelPath" else ""
            self.missing.append(f"{path}: `{value}` does not exist (looked in {os.getcwd()}){also}")
        return local
