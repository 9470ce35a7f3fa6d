"""Check whether the training run on this machine or in this container makes progress: the health check of the image.

    python cluster/health.py

Exits with status 1 if a process has shown no sign of life for longer than its recipe's `training.watchdog`, or if the
driver does not show the GPUs on which the run has begun. Exporting, saving a checkpoint, validating, and compiling the
first batch may take an hour. Other programs, runs without a watchdog, and runs that are still importing packages show
no signs; for these, the status is 0.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import os
import time
from collections.abc import Iterator

from cluster.check import QUERY, gpus
from recipes.checking.finding import Finding
from recipes.config.command_line import path_of
from recipes.training.heartbeat import VARIABLE, heartbeats


def health(folder: Path, query: tuple[str, ...] = QUERY) -> Iterator[Finding]:
    """What is known of the processes that train.

    Args:
        folder: where they write their heartbeats.
        query: the program that lists the GPUs; see `cluster.check.gpus`.
    """
    found, now = heartbeats(folder), time.monotonic()
    if not found:
        yield Finding("ok", "run", "no process that shows signs of life, or not yet")
        return
    late = [beat for beat in found if beat.until < now]
    for beat in late:
        yield Finding("error", "run", f"process {beat.process} has shown no sign of life since {beat.hook}")
    if not late:
        yield Finding("ok", "run", f"{len(found)} processes go on")
    on_gpu = sum(beat.on_gpu for beat in found)
    if on_gpu:
        yield from gpus(on_gpu, query)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=path_of, help=f"folder of the heartbeats (default: the variable {VARIABLE})")
    options = parser.parse_args(arguments)
    folder = options.folder or os.environ.get(VARIABLE)
    if not folder:
        parser.error(f"give --folder, or set {VARIABLE} here and where the run starts")
    findings = [*health(Path(folder))]
    print("\n".join(map(str, findings)), flush=True)
    return 1 if any(finding.level == "error" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
