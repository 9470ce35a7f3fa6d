"""`recipes/evaluate.py EXPORT YAML key=value`: checked before anything slow is imported."""

from __future__ import annotations

from pathlib import Path

from recipes.config.command_line import read_command_line, user_errors
from recipes.evaluation.config import Evaluation


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
        if command.dry_run:
            print(describe(command.config))
            return
        from recipes.evaluation.report import markdown
        from recipes.evaluation.run import evaluate

        result = evaluate(Path(arguments[0]), command.config)
        if result is not None:
            print(markdown(result), end="")


def describe(config: Evaluation) -> str:
    """How many images an evaluation draws per caption, and where it writes."""
    sweeps = sum(len(values) for values in config.sweeps.values())
    pool = 0 if config.rerank is None else max(config.rerank.pools)
    return f"evaluate: {1 + sweeps + pool} images per caption, {', '.join(config.metrics)}; report in {config.out}"
