"""Tables of results: printed, and written as JSON and Markdown together with hardware, versions and date."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.files import write_json, write_text

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "xformers", "mosaicml", "mosaicml-streaming", "diffusers", "webdataset", "tokenizers")


def write_results(name: str, size: str, rows: list[dict[str, Any]], notes: str = "") -> Path:
    """Print rows as a table and write results/<name>-<size>-<hardware>.{json,md}.

    Args:
        name: name of the benchmark.
        size: the size that was measured.
        rows: one dict per row of the table, all with the same keys.
        notes: text below the table.

    Returns:
        The Markdown file.
    """
    record = {"benchmark": name, "size": size, **surroundings(), "notes": notes, "rows": rows}
    text = f"# {name}, {size}\n\n{describe(record)}\n\n{table(rows)}\n" + (f"\n{notes}\n" if notes else "")
    print(text)
    path = RESULTS / f"{name}-{size}-{'gpu' if record['gpu'] else 'cpu'}.md"
    write_text(path, text)
    write_json(path.with_suffix(".json"), record, indent=1)
    return path


def surroundings() -> dict[str, Any]:
    """Hardware, versions and date, without the name of the machine."""
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
    """One line with the date, hardware and versions of a record."""
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
