"""Time of an optimizer step with 16-bit moments, compared with PyTorch's fused AdamW on a transformer's parameters.

    python benchmarks/adam16.py                # d = 512, 2 layers on a CPU; d = 1920, 24 layers on a GPU
    python benchmarks/adam16.py --width 3968 --layers 8

Goal on a GPU: at most 1.5 times the time of fused AdamW. For each parameter, a step must read parameter and gradient
and write the parameter (12 bytes), and read and write the moments (8 bytes if they have 16 bits, 16 if they have 32).
If memory bandwidth is the limit, the shortest possible time is therefore 20/28 of fused AdamW's. Times are medians.
Each optimizer is measured by itself, because the memory of all together would be that of a whole GPU.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import nn

from benchmarks.common.options import positive
from benchmarks.common.reporting import keep_results, reason, write_results
from benchmarks.common.timing import times, training_device
from recipes.algorithms.sixteen_bit.adam16 import Adam16

ARGUMENTS = {"lr": 4.5e-4, "betas": (0.9, 0.96), "eps": 1e-8, "weight_decay": 4.5e-2}


def parameters(width: int, layers: int, device: str) -> list[nn.Parameter]:
    """A transformer's matrices and gains, each with a gradient."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    shapes = (matrices + vectors) * layers
    found = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter) * 1e-4
    return found


def grouped(found: list[nn.Parameter]) -> list[dict]:
    """Parameter groups: matrices with 16-bit moments, vectors with 32-bit ones."""
    return [
        {"params": [p for p in found if p.ndim == 2], "moment_bits": 16},
        {"params": [p for p in found if p.ndim == 1], "moment_bits": 32},
    ]


def main(arguments: list[str] | None = None) -> None:
    gpu = training_device().type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=positive, default=1920 if gpu else 512)
    parser.add_argument("--layers", type=positive, default=24 if gpu else 2)
    parser.add_argument("--rounds", type=positive, default=30 if gpu else 10, help="measured steps of each alternative")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    alternatives: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, **ARGUMENTS),
        "AdamW, one tensor at a time": lambda p: torch.optim.AdamW(p, foreach=False, **ARGUMENTS),
        "adam16, compiled": lambda p: Adam16(grouped(p), compiled=True, **ARGUMENTS),
        "adam16": lambda p: Adam16(grouped(p), compiled=False, **ARGUMENTS),
        "adam16's code with 32-bit moments, compiled": lambda p: Adam16(p, moment_bits=32, compiled=True, **ARGUMENTS),
    }
    if gpu and importlib.util.find_spec("apex"):
        from apex.optimizers import FusedAdam

        alternatives["apex's FusedAdam"] = lambda p: FusedAdam(p, adam_w_mode=True, **ARGUMENTS)
    compare("adam16", options.width, alternatives, lambda make: measured(make, options, gpu))


def compare(
    benchmark: str, width: int, alternatives: dict[str, Callable[..., Any]], measure: Callable[..., dict[str, Any]]
) -> None:
    """Write a table of the time of a step of each optimizer, relative to fused AdamW.

    Args:
        benchmark: name of the table.
        width: of the transformer, for the name.
        alternatives: functions that make an optimizer of parameters, by its name; "AdamW, fused" is the first.
        measure: returns the cells of a row, given such a function.
    """
    reference: float | None = None
    rows: list[dict[str, Any]] = []
    for name, make in alternatives.items():
        values: dict[str, Any] = {"optimizer": name}
        try:
            values |= measure(make)
            reference = reference or (values["ms per step"] if name == "AdamW, fused" else None)
            values["relative to fused AdamW"] = round(values["ms per step"] / reference, 2) if reference else ""
        except Exception as error:  # one that does not run here; the others still count
            values["ms per step"] = reason(error)
        rows.append(values)
        keep_results(benchmark, f"d{width}", rows)
    write_results(benchmark, f"d{width}", rows)


def measured(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], options: argparse.Namespace, gpu: bool
) -> dict[str, Any]:
    """Cells of a row. When this returns or raises, all memory is free again."""
    made = parameters(options.width, options.layers, "cuda" if gpu else "cpu")
    optimizer = make(made)
    seconds = times({"": optimizer.step}, options.rounds, gpu)[""]
    count = sum(p.numel() for p in made)
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()) / count
    return {
        "parameters": count,
        "bytes of moments per parameter": round(held, 3),
        "ms per step": round(1e3 * seconds, 2),
        "GB/s": round((12 + 2 * held) * count / seconds / 1e9, 1),
    }


if __name__ == "__main__":
    main()
