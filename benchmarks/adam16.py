"""Time of an optimizer step with 16-bit moments, compared with PyTorch's fused AdamW on a transformer's parameters.

    python benchmarks/adam16.py                # d = 512, 2 layers on a CPU; d = 1920, 24 layers on a GPU
    python benchmarks/adam16.py --width 3968 --layers 8

Goal on a GPU: at most 1.5 times the time of fused AdamW. For each parameter, a step must read parameter and gradient
and write the parameter (12 bytes), and read and write the moments (8 bytes if they have 16 bits, 16 if they have 32).
If memory bandwidth is the limit, the shortest possible time is therefore 20/28 of fused AdamW's. Times are medians; the
alternatives take turns.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import nn

from benchmarks.reporting import write_results
from benchmarks.timing import times
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
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1920 if gpu else 512)
    parser.add_argument("--layers", type=int, default=24 if gpu else 2)
    parser.add_argument("--rounds", type=int, default=30 if gpu else 10, help="measured steps of each alternative")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    def made() -> list[nn.Parameter]:
        return parameters(options.width, options.layers, "cuda" if gpu else "cpu")

    optimizers = {
        "AdamW, fused": torch.optim.AdamW(made(), fused=True, **ARGUMENTS),
        "AdamW, one tensor at a time": torch.optim.AdamW(made(), foreach=False, **ARGUMENTS),
        "adam16, compiled": Adam16(grouped(made()), compiled=True, **ARGUMENTS),
        "adam16": Adam16(grouped(made()), compiled=False, **ARGUMENTS),
        "adam16's code with 32-bit moments, compiled": Adam16(made(), moment_bits=32, compiled=True, **ARGUMENTS),
    }
    if gpu and importlib.util.find_spec("apex"):
        from apex.optimizers import FusedAdam

        optimizers["apex's FusedAdam"] = FusedAdam(made(), adam_w_mode=True, **ARGUMENTS)
    seconds = times({name: optimizer.step for name, optimizer in optimizers.items()}, options.rounds, gpu)
    reference = seconds["AdamW, fused"]
    count = sum(p.numel() for p in optimizers["AdamW, fused"].param_groups[0]["params"])
    rows = []
    for name, optimizer in optimizers.items():
        held = optimizer.memory()["bytes_per_parameter"] if isinstance(optimizer, Adam16) else 8.0
        rows.append(
            {
                "optimizer": name,
                "parameters": count,
                "bytes of moments per parameter": round(held, 3),
                "ms per step": round(1e3 * seconds[name], 2),
                "relative to fused AdamW": round(seconds[name] / reference, 2),
                "GB/s": round((12 + 2 * held) * count / seconds[name] / 1e9, 1),
            }
        )
    write_results("adam16", f"d{options.width}", rows)


if __name__ == "__main__":
    main()
