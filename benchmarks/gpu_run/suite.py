"""The tests marked `gpu`, each as a row as soon as it is done."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_run.context import Context

ROOT = Path(__file__).resolve().parents[2]
TABLE = "Tests marked gpu"


class Rows:
    """A pytest plugin that records how each test ended."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.results: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest for the set-up, the call and the end of every test."""
        if report.when == "call" or report.outcome != "passed":
            values = {"test": report.nodeid, "result": report.outcome, "s": round(report.duration, 1)}
            if report.outcome == "failed":
                values["reason"] = reason(report)
            elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
                values["reason"] = report.longrepr[2]
            self.results.append(report.outcome)
            self.context.records.row(TABLE, values)


def reason(report: Any) -> str:
    """The last line of what pytest shows of an error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr)).split())[:300]


def files_with(mark: str) -> list[str]:
    """Test files that use a mark: importing all others to find nothing would take most of the time."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if f"mark.{mark}" in path.read_text(encoding="utf-8")]


def marked_tests(context: Context, *, processes: int = 4) -> None:
    """Run the tests in `processes` processes where pytest-xdist is installed.

    Raises:
        RuntimeError: some of them failed, or pytest itself did.
    """
    arguments = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    # tests/conftest.py lets each process compile one kernel at a time, and a U-Net has 350 of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if processes > 1 and importlib.util.find_spec("xdist"):
        arguments += ["-n", str(processes), "--dist", "loadgroup"]
    rows = Rows(context)
    code = pytest.main([*arguments, *(str(ROOT / path) for path in files_with("gpu"))], plugins=[rows])
    count, failed = len(rows.results), rows.results.count("failed")
    context.records.note(TABLE, f"{count} results, {failed} failed.")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest: {pytest.ExitCode(code).name.lower()}, {failed} of {count} failed")
