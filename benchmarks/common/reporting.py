"""Tables of results: printed, and written as JSON and Markdown together with hardware, versions, date and commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.system.files import write_json, write_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = "PRECOMPOSE_COMMIT"  # variable that names the commit where the code was carried without its repository
PACKAGES = ("torch", "triton", "xformers", "mosaicml", "mosaicml-streaming", "diffusers", "webdataset", "tokenizers")


_keep: Callable[[dict[str, Any]], None] | None = None  # of `collected`


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
    print(as_text(record))
    (_keep or save)(record)
    return markdown_file(record)


def keep_results(name: str, size: str, rows: list[dict[str, Any]]) -> None:
    """Keep the rows so far where `collected` says so, for the case that the run is cut off before `write_results`."""
    if _keep is not None:
        _keep({"benchmark": name, "size": size, **surroundings(), "notes": "", "rows": list(rows)})


def as_text(record: dict[str, Any]) -> str:
    """A record as Markdown."""
    notes = record["notes"]
    title = f"# {record['benchmark']}, {record['size']}"
    return f"{title}\n\n{describe(record)}\n\n{table(record['rows'])}\n" + (f"\n{notes}\n" if notes else "")


def markdown_file(record: dict[str, Any]) -> Path:
    """Where the table of a record belongs."""
    return RESULTS / f"{record['benchmark']}-{record['size']}-{'gpu' if record['gpu'] else 'cpu'}.md"


def save(record: dict[str, Any]) -> None:
    """Write the two files of a record."""
    path = markdown_file(record)
    write_text(path, as_text(record))
    write_json(path.with_suffix(".json"), record, indent=1)


@contextmanager
def collected(keep: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """A context in which `keep` is called with the records of `write_results` and `keep_results`, and no files are
    written. Of several records of one benchmark and size, the last has all rows."""
    global _keep
    _keep = keep
    try:
        yield
    finally:
        _keep = None


def surroundings() -> dict[str, Any]:
    """Hardware, versions, date and commit, without the name of the machine."""
    gpu = None
    try:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except ImportError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
    }


def describe(record: dict[str, Any]) -> str:
    """One line with the date, commit, hardware and versions of a record."""
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    hardware = record["gpu"] or f"{record['cores']} cores of {record['processor']}"
    return f"{record['date']}, commit {record['commit']}, {hardware}, Python {record['python']}, {versions}"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, with a column for every key of any row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def reason(error: BaseException) -> str:
    """Why something does not run here, in one line for a table: the kind of the error and its first words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def commit() -> str:
    """The commit of the code, with "and changes" if tracked files differ from it; "unknown" outside of a repository.

    Results and documents may differ: writing the first table of a run must not change what the second one says.
    """
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found} and changes" if changed else found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value).replace("|", "\\|").replace("\n", " ")


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
