"""Time of an optimizer step with Muon, compared with PyTorch's fused AdamW on a transformer's parameters.

    python benchmarks/muon.py                # d = 512, 2 layers on a CPU; d = 1920, 24 layers on a GPU
    python benchmarks/muon.py --width 3968 --layers 8

Muon needs matrix products: for m x n matrices with m <= n, five iterations of 4 m^2 n + 2 m^3 FLOP each. `tokens` is
the number of tokens for which a training step computes as much in these matrices (6 m n FLOP per token). Times are
medians. Each optimizer is measured by itself, because the memory of all together would be that of a whole GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import nn

from benchmarks.adam16 import compare, parameters
from benchmarks.common.options import positive
from benchmarks.common.timing import times, training_device
from recipes.algorithms import muon
from recipes.algorithms.muon import Muon, flop

ARGUMENTS = {"lr": 1e-3, "weight_decay": 0.01}


class Both:
    """PyTorch's Muon for matrices and its AdamW for vectors."""

    def __init__(self, found: list[nn.Parameter]) -> None:
        self.parts = [
            torch.optim.Muon([p for p in found if p.ndim == 2], **ARGUMENTS),
            torch.optim.AdamW([p for p in found if p.ndim == 1], fused=True, **ARGUMENTS),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def ours(found: list[nn.Parameter]) -> Muon:
    matrices, vectors = ([p for p in found if p.ndim == dimensions] for dimensions in (2, 1))
    return Muon([{"params": matrices}, {"params": vectors, "matrices": False}], **ARGUMENTS)


def one_by_one(found: list[nn.Parameter]) -> Any:
    optimizer = ours(found)
    optimizer.step = patch.object(muon, "TOGETHER", 1)(optimizer.step)
    return optimizer


def main(arguments: list[str] | None = None) -> None:
    gpu = training_device().type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=positive, default=1920 if gpu else 512)
    parser.add_argument("--layers", type=positive, default=24 if gpu else 2)
    parser.add_argument("--rounds", type=positive, default=30 if gpu else 10, help="measured steps of each alternative")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    alternatives: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, **ARGUMENTS),
        "muon": ours,
        "muon, one matrix at a time": one_by_one,
    }
    if hasattr(torch.optim, "Muon"):  # from 2.9 on
        alternatives["PyTorch's Muon"] = Both
    compare("muon", options.width, alternatives, lambda make: measured(make, options, gpu))


def measured(make: Callable[[list[nn.Parameter]], Any], options: argparse.Namespace, gpu: bool) -> dict[str, Any]:
    """Cells of a row. When this returns or raises, all memory is free again."""
    made = parameters(options.width, options.layers, "cuda" if gpu else "cpu")
    optimizer = make(made)
    seconds = times({"": optimizer.step}, options.rounds, gpu)[""]
    products = not isinstance(optimizer, torch.optim.AdamW)
    matrices = [p for p in made if p.ndim == 2]
    flops = sum(map(flop, matrices)) if products else 0
    return {
        "parameters": sum(p.numel() for p in made),
        "ms per step": round(1e3 * seconds, 2),
        "GFLOP": round(flops / 1e9, 1) if products else "",
        "GFLOP/s": round(flops / seconds / 1e9, 1) if products else "",
        "tokens": round(flops / (6 * sum(p.numel() for p in matrices))) if products else "",
    }


if __name__ == "__main__":
    main()
