"""The records of `benchmarks/gpu.py` as Markdown, and their place in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import reporting
from benchmarks.common.reporting import as_text, describe, table
from benchmarks.gpu_run.records import RECORDS, Attempt, Records, attempts, merged, rows_of, that_count
from data.system.files import write_text

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
# (what, table, column of the table, goal on one H200)
GOALS = (
    ("U-Net training at 256", "U-Net at 256", "images/s", 900),
    ("U-Net training at 512", "U-Net at 512", "images/s", 200),
    ("transformer of 1.3 billion parameters", "transformer", "tokens/s", 65_000),
    ("VAE encoding at 256", "VAE encoding at 256", "images/s", 1_650),
    ("VAE encoding at 512", "VAE encoding at 512", "images/s", 400),
)


def write_page(records: Records, path: Path) -> None:
    """Write everything so far as Markdown."""
    write_text(path, page(records))


def page(records: Records, level: int = 1) -> str:
    """Everything that counts as Markdown, with headings from a level on. What was found on another GPU, with other
    packages or with another commit is in a section of its own; the newest is first."""
    sections: dict[str, list[Attempt]] = {}
    for one in that_count(attempts(records.lines())):
        sections.setdefault(one.conditions, []).append(one)
    newest_first = sorted(sections.values(), key=lambda chosen: chosen[-1].run.get("began", ""), reverse=True)
    parts = ["#" * level + " Runs of benchmarks/gpu.py"] if level == 1 else []
    return "\n\n".join([*parts, *(part for chosen in newest_first for part in section(chosen, level + 1))]) + "\n"


def section(chosen: list[Attempt], level: int) -> list[str]:
    """The parts of what was found under one set of conditions."""
    run, below = chosen[-1].run, "#" * (level + 1)
    parts = []
    if run:
        found = run["surroundings"]
        dates = dict.fromkeys(one.run["surroundings"]["date"] for one in chosen)
        size = ", tiny sizes" if run["small"] else ""
        parts += [f"{'#' * level} {found['gpu'] or 'No GPU'}, commit {found['commit']}{size}"]
        parts += [describe(found | {"date": ", ".join(dates)})]
    if run and not run["small"]:  # the goals are those of the published sizes
        parts += [f"{below} Goals", table(goals(chosen))]
    steps = [{"step": one.item, "result": one.state, "s": one.seconds} for one in chosen if one.item]
    if steps:
        parts += [f"{below} Steps", table(steps)]
    lines = [line for one in chosen for line in one.found]
    for name in dict.fromkeys(line["table"] for line in lines if line["kind"] == "row"):
        notes = dict.fromkeys(line["text"] for line in lines if line["kind"] == "note" and line["table"] == name)
        parts += [f"{below} {name}", table([line["values"] for line in rows_of(chosen, name)]), *notes]
    # The last one of a benchmark and size: those before have only its first rows.
    records = [line["record"] for line in lines if line["kind"] == "record"]
    tables = {(record["benchmark"], record["size"]): record for record in records}
    return parts + [as_text(record).replace("# ", f"{below} ", 1).strip() for record in tables.values()]


def goals(chosen: list[Attempt]) -> list[dict[str, Any]]:
    """Rows of the table that compares with the goals."""
    found = []
    for what, name, column, goal in GOALS:
        values = [line["values"].get(column) for line in rows_of(chosen, name)]
        reached = max((value for value in values if isinstance(value, int | float)), default=None)
        share = "" if reached is None else f"{reached / goal:.0%}"
        found.append({"": what, "unit": column, "goal": goal, "reached": reached or "", "of the goal": share})
    return found


def place(records: Records) -> None:
    """Write tables of runs to benchmarks/results, and all of them to docs/gpu.md, beside what is there of other steps.

    What is there is kept in benchmarks/results/gpu.jsonl, from which the page is made.

    Raises:
        ValueError: nothing was measured at the published sizes.
    """
    if not merged([records]):
        raise ValueError(f"{records.path} has no results at the published sizes")
    placed = Records(reporting.RESULTS / RECORDS)
    before, lines = placed.lines("record"), merged([placed, records])
    write_text(placed.path, "".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        if line["kind"] == "record" and line not in before:
            reporting.save(line["record"])
    above, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    below = rest.split(END)[1]
    write_text(DOCUMENT, f"{above}{BEGIN}\n\n{page(placed, level=2).strip()}\n\n{END}{below}")
