"""The source code of components, which is read without running it."""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

from recipes.config.values import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def module_tree(module: str) -> ast.Module:
    """The syntax tree of a module.

    Raises:
        ConfigError: there is no such file, or it is not Python.
    """
    file = source_file(module)
    try:
        return ast.parse(file.read_bytes(), filename=str(file))  # as bytes: Python's own rules for their encoding
    except SyntaxError as error:
        raise ConfigError([f"{file}: line {error.lineno}: {error.msg}"]) from None


def source_file(module: str) -> Path:
    """The file of a module of this repository or of an installed package.

    Raises:
        ConfigError: there is none.
    """
    top, *rest = module.split(".")
    folders = [str(ROOT / top)]
    if not _files(folders, rest) and (spec := find_spec(top)) is not None:  # of a top-level module, which runs no code
        folders = list(spec.submodule_search_locations or [str(spec.origin).removesuffix(".py")])
    for file in _files(folders, rest):
        return file
    raise ConfigError([f"{module}: no such module (looked in {', '.join(folders)})"])


def _files(folders: list[str], rest: list[str]) -> list[Path]:
    """The files that a module of one of these top-level folders may be, in the order in which Python takes them."""
    paths = [Path(folder, *rest) for folder in folders]
    files = [file for path in paths for file in (path / "__init__.py", path.with_name(f"{path.name}.py"))]
    return [file for file in files if file.is_file()]
