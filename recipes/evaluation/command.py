"""`recipes/evaluate.py EXPORT YAML key=value`: checked before anything slow is imported."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from pathlib import Path
from typing import Any

from data.cost import count_text
from data.system.errors import visible
from recipes.config.command_line import print_once, read_command_line, user_errors
from recipes.config.values import quoted
from recipes.evaluation.config import Evaluation
from recipes.evaluation.variants import distinct, variants
from recipes.generation.exports import family_of, find_export

# By the type that an option has on the command line, what it may be in a YAML, and its name.
TYPES = {float: (int, float), int: int, str: str, Path: str, bool: bool}
NAMES = {float: "a number", int: "an integer", str: "a text", Path: "a path", bool: "true or false"}


def main(arguments: list[str], usage: str | None) -> None:
    """Evaluate an export and print the table.

    Args:
        arguments: the export, a YAML, overrides and flags.
        usage: for help and errors.
    """
    command = read_command_line(arguments[1:], Evaluation, usage)
    with user_errors():
        if not Path(arguments[0]).exists():
            raise FileNotFoundError(f"{arguments[0]}: no such export")
        check_options(command.config, find_export(Path(arguments[0])))
        if command.dry_run:
            print_once(describe(command.config))
            return
        from recipes.evaluation.report import markdown
        from recipes.evaluation.run import evaluate

        result = evaluate(Path(arguments[0]), command.config)
        if result is not None:
            print(visible(markdown(result)), end="")


def describe(config: Evaluation) -> str:
    """How many images an evaluation draws per caption, and where it writes."""
    number = sum(max(variant.pools, default=1) for variant in distinct(variants(config)))
    drawn = count_text(number, "image")
    return f"evaluate: {drawn} per caption, {', '.join(config.metrics)}; report in {config.out}"


def check_options(config: Evaluation, export: Path) -> None:
    """
    Raises:
        ValueError: an option of sampling or of a sweep that the model's family does not have, or a value of another
            type.
    """
    family = family_of(export)
    flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in family.options}
    known = {"guidance": float, **{name: _type_of(family.options[flag]) for name, flag in flags.items()}}
    for section in ("sampling", "sweeps"):
        for name, values in getattr(config, section).items():
            if name not in known:
                options = ", ".join(sorted(known))
                raise ValueError(f"{section}.{name}: no option of {family.title} models, which have {options}")
            for value in values if section == "sweeps" else [values]:
                kind = known[name]
                right = isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind is bool)
                if value is not None and not right:
                    raise ValueError(f"{section}.{name}: {quoted(value)}; give {NAMES[kind]}")


def _type_of(settings: dict[str, Any]) -> type:
    """Of an option: bool for one of the two flags --option and --no-option."""
    return bool if settings.get("action") is BooleanOptionalAction else settings.get("type", str)
