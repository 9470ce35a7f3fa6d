"""What runs of `benchmarks/gpu.py` have found: one JSON object per line, in a file that only grows.

A step may run again, in another run that has mended it. What counts of a step, on a GPU, is the newest run of it that
found anything. Numbers are compared only with those of the same GPU, packages and commit.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_run.subjects import START

RECORDS, MARKDOWN, LOG = "gpu.jsonl", "gpu.md", "gpu.log"  # files of a run
RELATIVE = "relative to start"  # column of the training tables
DONE = "done"
LEFT_OUT = "left out: the budget is spent"
CUT_OFF = "cut off"
LATE = "FAILED: ended after"  # so many seconds
Line = dict[str, Any]


@dataclass
class Attempt:
    """One run of a step.

    Attributes:
        run: the line of the whole run.
        item: name of the step.
        found: its rows, notes and records.
        state: how it ended.
        seconds: how long it took.
    """

    run: Line
    item: str
    found: list[Line] = field(default_factory=list)
    state: str = CUT_OFF
    seconds: Any = ""

    @property
    def place(self) -> tuple[Any, ...]:
        """The step, its size and its GPU: an attempt replaces earlier ones that have the same."""
        return self.item, self.run.get("small"), self.run.get("surroundings", {}).get("gpu")

    @property
    def ended_by_itself(self) -> bool:
        """Whether it has found all that it could, an error included."""
        return self.state not in (CUT_OFF, LEFT_OUT) and not self.state.startswith(LATE)

    @property
    def conditions(self) -> str:
        """Equal for attempts whose numbers may be compared: GPU, processor, packages, commit and size. A commit with
        changes, or none that is known, is the same within a run only."""
        found = self.run.get("surroundings", {})
        found = {name: value for name, value in found.items() if name != "date"} | {"small": self.run.get("small")}
        if str(found.get("commit", "")).endswith(("and changes", "unknown")):
            found["began"] = self.run.get("began")
        return json.dumps(found, sort_keys=True)


class Records:
    """The file. Each line is written whole, so that nothing is lost when a run is cut off.

    Kinds of lines: `run` (when it began, hardware, versions, commit), `begin` and `end` of an item, and between them
    `row` of a table, `note` below a table, `record` (what `benchmarks.common.reporting.write_results` writes).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def begin_run(self, **values: Any) -> None:
        """Append the line with which a run begins."""
        self.add("run", began=datetime.datetime.now(datetime.UTC).isoformat(), **values)

    def add(self, kind: str, **values: Any) -> None:
        """Append a line."""
        line = json.dumps({"kind": kind, **values}) + "\n"
        with open(self.path, "a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = "\n" + line  # a step was cut off within its last line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def row(self, table: str, values: dict[str, Any], **hidden: Any) -> None:
        """Append a row of a table. `hidden` values are kept in the record only."""
        self.add("row", table=table, values=values, **hidden)

    def note(self, table: str, text: str) -> None:
        """Append a sentence below a table, which is shown once."""
        self.add("note", table=table, text=text)

    def lines(self, kind: str | None = None) -> list[Line]:
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

    def rows(self, table: str) -> list[Line]:
        """The lines of a table's rows that may be compared with what the last run finds."""
        found = attempts(self.lines())
        return rows_of((one for one in that_count(found) if one.conditions == found[-1].conditions), table)

    def tried(self) -> dict[str, bool]:
        """The steps that have begun in runs whose numbers may be compared with those of the last: name -> whether one
        of its attempts has ended well."""
        found = attempts(self.lines())
        last = Attempt(self.lines("run")[-1], "")
        alike = [one for one in found if one.state != LEFT_OUT and one.conditions == last.conditions]
        return {one.item: any(other.item == one.item and other.state == DONE for other in alike) for one in alike}


def attempts(lines: Iterable[Line]) -> list[Attempt]:
    """The attempts of the lines of a file, in their order."""
    run: Line = {}
    found: list[Attempt] = []
    for line in lines:
        if line["kind"] == "run":
            run = line
        elif line["kind"] == "begin":
            found.append(Attempt(run, line["item"]))
        else:
            if not found or found[-1].run is not run:
                found.append(Attempt(run, line.get("item", "")))
            if line["kind"] == "end":
                found[-1].state, found[-1].seconds = line["state"], line["seconds"]
            else:
                found[-1].found.append(line)
    return found


def that_count(found: list[Attempt]) -> list[Attempt]:
    """The attempts that a page shows: of each step on each GPU the newest with results, and a newer one without any.

    One that was ended before its time does not replace one that has gone to its end under the same conditions.
    """
    newest: dict[tuple[Any, ...], Attempt] = {}
    results: dict[tuple[Any, ...], Attempt] = {}
    for one in found:
        before = results.get(one.place)
        if before and before.ended_by_itself and not one.ended_by_itself and before.conditions == one.conditions:
            continue
        if one.state != LEFT_OUT or one.place not in newest:
            newest[one.place] = one
        if one.found:
            results[one.place] = one
    chosen = {id(one) for one in (*newest.values(), *results.values())}
    return [one for one in found if id(one) in chosen]


def rows_of(chosen: Iterable[Attempt], table: str) -> list[Line]:
    """The lines of a table's rows, of attempts under one set of conditions, with their rates relative to that of the
    starting point."""
    found = [line for one in chosen for line in one.found if line["kind"] == "row" and line["table"] == table]
    start = next((line["rate"] for line in found if line.get("setting") == START and line.get("rate")), None)
    for number, line in enumerate(found):
        if RELATIVE in line["values"]:
            share = line["rate"] / start if start and line.get("rate") and line["setting"] != START else None
            found[number] = line | {"values": line["values"] | {RELATIVE: "" if share is None else round(share, 3)}}
    return found


def merged(files: Iterable[Records]) -> list[Line]:
    """The lines of several files that count, by the times at which their runs began. Published sizes only.

    A run that is in several files is taken from the one that has most of it: others keep of it what counted there.
    """
    runs: dict[str, list[Line]] = {}
    for file in files:
        parts: list[list[Line]] = []
        for line in file.lines():
            if line["kind"] == "run":
                parts.append([line])
            elif parts:
                parts[-1].append(line)
        for part in parts:
            name = json.dumps(part[0], sort_keys=True)
            if not part[0]["small"] and len(part) > len(runs.get(name, [])):
                runs[name] = part
    ordered = sorted(runs.values(), key=lambda part: part[0].get("began", ""))
    return list(_lines_of(that_count(attempts(line for part in ordered for line in part))))


def _lines_of(chosen: list[Attempt]) -> Iterable[Line]:
    run: Line | None = None
    for one in chosen:
        if one.run is not run:
            run = one.run
            yield run
        yield {"kind": "begin", "item": one.item}
        # The last record of a benchmark and size: those before have only its first rows.
        last = {(line["record"]["benchmark"], line["record"]["size"]): line for line in _records(one)}
        yield from (line for line in one.found if line["kind"] != "record" or line in last.values())
        yield {"kind": "end", "item": one.item, "state": one.state, "seconds": one.seconds}


def _records(one: Attempt) -> Iterable[Line]:
    return (line for line in one.found if line["kind"] == "record")
