"""What every step of `benchmarks/gpu.py` is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.reporting import collected
from benchmarks.gpu_run.records import RECORDS, Records


@dataclass(frozen=True)
class Context:
    """Where results go, and at which size a step works.

    Attributes:
        folder: for files, such as traces.
        small: tiny sizes, for a machine without a GPU.
    """

    folder: Path
    small: bool

    @property
    def records(self) -> Records:
        """The run's records."""
        return Records(self.folder / RECORDS)

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU where PyTorch sees none."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def benchmark(context: Context, *, module: str, arguments: list[str], small: list[str]) -> None:
    """Run the `main(arguments)` of another benchmark, and keep each of its tables as soon as it is there.

    Args:
        module: its name in `benchmarks`.
        arguments: of its command line.
        small: the same for tiny sizes.
    """
    import importlib

    main: Any = importlib.import_module(f"benchmarks.{module}").main
    with collected(lambda record: context.records.add("record", record=record)):
        main(small if context.small else arguments)
