"""Check quickly whether a machine can be used; a job does this on each machine before it starts.

    python cluster/check.py --gpus 8

Makes those checks of `recipes/doctor.py` that need no torch, and exits with status 1 if the machine cannot be used.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import os
import shutil
import subprocess
from collections.abc import Iterator

from data.system.errors import visible
from recipes.checking.finding import Finding
from recipes.checking.machine import SECONDS, cheap_checks
from recipes.config.command_line import path_of

QUERY = ("nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits")


def gpus(wanted: int, query: tuple[str, ...] = QUERY) -> Iterator[Finding]:
    """Whether the driver shows as many GPUs as the job takes, without errors in their memory.

    Args:
        wanted: number of GPUs.
        query: the program that lists the GPUs, one "number, count of errors" per line.
    """
    if shutil.which(query[0]) is None:
        yield Finding("error", "GPUs", f"{query[0]} is not there, and {wanted} GPUs are wanted")
        return
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("error", "GPUs", f"{query[0]} hangs: the driver or a GPU is broken; restart the machine")
        return
    rows = [line.split(",") for line in listed.stdout.splitlines() if "," in line]
    # In the place of the count: [GPU is lost], [GPU requires reset].
    gone = [row for row in rows if "lost" in row[1] or "reset" in row[1]]
    rows = [row for row in rows if row not in gone]
    if len(rows) < wanted:
        yield Finding("error", "GPUs", f"the driver shows {len(rows)} of {wanted}")
    broken = [row[0].strip() for row in rows if row[1].strip().isdecimal() and int(row[1]) > 0]
    if broken:
        yield Finding("error", "GPUs", f"uncorrected errors in the memory of {', '.join(broken)}: reset them")
    if len(rows) >= wanted and not broken:
        yield Finding("ok", "GPUs", f"{len(rows)}")


def writable(folder: Path) -> Finding:
    """Whether files can be written where the run writes."""
    file = folder / f".check-{os.uname().nodename}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\0" * 4096)
        file.unlink()
    except OSError as error:
        return Finding("error", "output", f"{folder}: {error.strerror or error}: is the file system mounted here?")
    return Finding("ok", "output", f"{folder} can be written")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs that the job takes here")
    parser.add_argument("--output", type=path_of, help="folder in which the job writes")
    options = parser.parse_args(arguments)
    findings = [*cheap_checks()]
    if options.gpus:
        findings += gpus(options.gpus)
    if options.output is not None:
        findings.append(writable(options.output))
    errors = [finding for finding in findings if finding.level == "error"]
    print("\n".join(map(str, findings)))
    text = f"cannot be used: {errors[0].text}" if errors else "can be used"
    print(visible(f"{os.uname().nodename}: {text}"), flush=True)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
