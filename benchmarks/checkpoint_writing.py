"""How long a full checkpoint takes to be written, while all devices wait: as torch.save writes it, and as runs do.

python benchmarks/checkpoint_writing.py
python benchmarks/checkpoint_writing.py --mb 10000 --folder /shared/scratch

The values are tensors of 64 MiB in the host's memory, so that copies from a device are not included. "to the system" is
the time until all is written to files, and "to the disk" the time after it until the system has brought it there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from data.system.files import to_disk
from recipes.config.command_line import path_of
from recipes.engines.checkpoints.checksums import save_full

TENSOR = 1 << 24  # values of 4 bytes


def theirs(values: Any, file: Path) -> None:
    with file.open("wb") as opened:
        torch.save(values, opened)


WAYS: dict[str, Callable[[Any, Path], None]] = {"torch.save": theirs, "checkpoints of runs": save_full}


def measure(values: dict[str, torch.Tensor], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each way, of the medians of a number of rounds in turns."""
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    file = folder / "checkpoint.pt"
    for _ in range(rounds):
        for way, write in WAYS.items():
            os.sync()
            began = time.perf_counter()
            write(values, file)
            written = time.perf_counter()
            to_disk(file)
            seconds[way].append((written - began, time.perf_counter() - written))
            file.unlink()
    size = sum(tensor.nbytes for tensor in values.values())
    rows = []
    for way, found in seconds.items():
        system, disk = (statistics.median(times) for times in zip(*found, strict=True))
        row = {"written by": way, "GB": round(size / 1e9, 2), "to the system, s": round(system, 2)}
        rows.append(row | {"to the disk, s": round(disk, 2), "GB/s": round(size / 1e9 / (system + disk), 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=positive, default=2000)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--folder", type=path_of, help="on the disk that is measured (default: that of TMPDIR)")
    options = parser.parse_args()
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    number = max(1, options.mb * 10**6 // (4 * TENSOR))
    values = {str(index): torch.full((TENSOR,), float(index)) for index in range(number)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(values, Path(folder), options.rounds)
    notes = f"Medians of {options.rounds} rounds. GB/s is the rate until all is on the disk."
    write_results("checkpoint_writing", f"{options.mb}mb", rows, notes)


if __name__ == "__main__":
    main()
