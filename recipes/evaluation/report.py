"""The report of an evaluation: JSON, a Markdown table, and plots of what was swept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.system.files import atomic_write, write_json, write_text


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write report.json, report.md and a plot per section that varies a number."""
    write_json(folder / "report.json", result, indent=2)
    write_text(folder / "report.md", markdown(result))
    for name, rows in curves(result).items():
        plot(name, rows, folder / f"{name}.png")


def markdown(result: dict[str, Any]) -> str:
    """The facts that the figures depend on, and a table with one row per way to draw the images."""
    facts = {key: value for key, value in result.items() if not isinstance(value, list)}
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {_text(value)} |" for name, value in facts.items()), ""]
    names = list(result["rows"][0]["figures"])
    lines += [f"| images | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for row in result["rows"]:
        values = [f"{row['figures'][name]:g}" for name in names]
        lines.append(f"| {row['label']} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return " ".join(str(value).split()).replace("|", "\\|")


def curves(result: dict[str, Any]) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """What was varied -> (value, figures), for variables with at least two numbers."""
    found: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for row in result["rows"]:
        for name, value in row["varied"].items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((value, row["figures"]))
    return {name: sorted(rows, key=lambda row: row[0]) for name, rows in found.items() if len(rows) > 1}


def plot(variable: str, rows: list[tuple[float, dict[str, float]]], file: Path) -> None:
    """One panel per figure against a variable."""
    from matplotlib.figure import Figure

    names = [name for name in rows[0][1] if not name.endswith("_std")]
    figure = Figure(figsize=(3.2 * len(names), 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot([value for value, _ in rows], [figures[name] for _, figures in rows], marker="o")
        if variable == "pool":
            axes.set_xscale("log", base=2)
        axes.set_xlabel(variable)
        axes.set_title(name)
    with atomic_write(file) as partial:
        figure.savefig(partial, format="png", dpi=120)
