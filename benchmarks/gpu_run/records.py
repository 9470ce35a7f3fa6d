"""What a run of `benchmarks/gpu.py` has found so far: one JSON object per line, and the same as Markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.reporting import as_text, describe, table
from data.files import write_text

RECORDS, MARKDOWN, LOG = "gpu.jsonl", "gpu.md", "gpu.log"  # files of a run
# (what, table, column of the table, goal on one H200)
GOALS = (
    ("U-Net training at 256", "U-Net at 256", "images/s", 900),
    ("U-Net training at 512", "U-Net at 512", "images/s", 200),
    ("transformer of 1.3 billion parameters", "transformer", "tokens/s", 65_000),
    ("VAE encoding at 256", "VAE encoding at 256", "images/s", 1_650),
    ("VAE encoding at 512", "VAE encoding at 512", "images/s", 400),
)


class Records:
    """A file that only grows. Each line is written whole, so that nothing is lost when a run is cut off.

    Kinds of lines: `run` (hardware, versions, commit), `begin` and `end` of an item, `row` of a table, `note` below a
    table, `record` (what `benchmarks.reporting.write_results` writes).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, **values: Any) -> None:
        """Append a line."""
        line = json.dumps({"kind": kind, **values}) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def row(self, table: str, values: dict[str, Any], **hidden: Any) -> None:
        """Append a row of a table. `hidden` values are kept in the record only."""
        self.add("row", table=table, values=values, **hidden)

    def note(self, table: str, text: str) -> None:
        """Append a sentence below a table; one that is there already is left out."""
        if not any(line["table"] == table and line["text"] == text for line in self.lines("note")):
            self.add("note", table=table, text=text)

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All lines so far, or those of a kind."""
        if not self.path.exists():
            return []
        found = []
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:  # cut off while the line was written
                continue
        return [line for line in found if kind in (None, line["kind"])]

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The lines of a table's rows."""
        return [line for line in self.lines("row") if line["table"] == table]

    def write_markdown(self, path: Path) -> None:
        """Write everything so far as Markdown."""
        write_text(path, self.as_text())

    def as_text(self, level: int = 1) -> str:
        """Everything so far as Markdown, with headings from a level on."""
        mark, below = "#" * level, "#" * (level + 1)
        parts = [f"{mark} A run of benchmarks/gpu.py"] if level == 1 else []
        parts += [describe(line["surroundings"]) for line in self.lines("run")[:1]]
        goals = self._goals()
        if goals:
            parts += [f"{below} Goals", table(goals)]
        items = self._items()
        if items:
            parts += [f"{below} Steps", table(items)]
        for name in dict.fromkeys(line["table"] for line in self.lines("row")):
            parts += [f"{below} {name}", table([line["values"] for line in self.rows(name)])]
            parts += [line["text"] for line in self.lines("note") if line["table"] == name]
        # The last one of a benchmark and size: those before have only its first rows.
        records = [line["record"] for line in self.lines("record")]
        tables = {(record["benchmark"], record["size"]): record for record in records}
        parts += [as_text(record).replace("# ", f"{below} ", 1).strip() for record in tables.values()]
        return "\n\n".join(parts) + "\n"

    def _goals(self) -> list[dict[str, Any]]:
        if any(line["small"] for line in self.lines("run")):
            return []  # the goals are those of the published sizes
        found = []
        for what, name, column, goal in GOALS:
            values = [line["values"].get(column) for line in self.rows(name)]
            reached = max((value for value in values if isinstance(value, int | float)), default=None)
            share = "" if reached is None else f"{reached / goal:.0%}"
            found.append({"": what, "unit": column, "goal": goal, "reached": reached or "", "of the goal": share})
        return found

    def _items(self) -> list[dict[str, Any]]:
        ends = {line["item"]: line for line in self.lines("end")}
        rows = []
        for line in self.lines("begin"):
            end = ends.get(line["item"], {"state": "cut off", "seconds": ""})
            rows.append({"step": line["item"], "result": end["state"], "s": end["seconds"]})
        return rows
