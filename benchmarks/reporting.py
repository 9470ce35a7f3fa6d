"""Tables of results: printed, and written as JSON and Markdown with what they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "xformers", "mosaicml", "mosaicml-streaming", "diffusers", "webdataset", "tokenizers")


def write_results(name: str, size: str, rows: list[dict[str, Any]], notes: str = "") -> Path:
    """Print rows as a table and write results/<name>-<size>-<hardware>.{json,md}.

    Args:
        name: of the benchmark.
        size: which of its sizes.
        rows: one dict a line, all with the same keys.
        notes: what a reader of the table must know.

    Returns:
        The Markdown file.
    """
    record = {"benchmark": name, "size": size, **surroundings(), "notes": notes, "rows": rows}
    text = f"# {name}, {size}\n\n{describe(record)}\n\n{table(rows)}\n" + (f"\n{notes}\n" if notes else "")
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{size}-{'gpu' if record['gpu'] else 'cpu'}.md"
    for file, content in ((path, text), (path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")):
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(content, encoding="utf-8")
        partial.replace(file)
    return path


def surroundings() -> dict[str, Any]:
    """Hardware, versions and date; no name of a machine."""
    gpu = None
    try:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except ImportError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
    }


def describe(record: dict[str, Any]) -> str:
    """One line of what a record was measured on."""
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    hardware = record["gpu"] or f"{record['cores']} cores of {record['processor']}"
    return f"{record['date']}, {hardware}, Python {record['python']}, {versions}"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
