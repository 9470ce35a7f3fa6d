"""Time of GEGLU, the gate of the U-Net's MLPs: the Triton kernels, PyTorch's own, and PyTorch's compiled.

    python benchmarks/geglu.py                   # one small shape on a CPU, Stable Diffusion 2's at 256 x 256 on a GPU
    python benchmarks/geglu.py --batch 32 --seconds 1

Each way maps (rows, 2 N) to (rows, N), both in bf16, forward and backward. The least traffic is that of reading the
input and writing the result, then reading both the input and the gradient, and writing the input's gradient.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import Tensor

from benchmarks.common.options import positive
from benchmarks.common.reporting import reason, write_results
from benchmarks.common.timing import milliseconds, training_device
from benchmarks.norms import copy_rate
from recipes.models.kernels.geglu import geglu, reference

DTYPE = torch.bfloat16
SD2 = ((1024, 1280), (256, 2560), (64, 5120))  # (tokens per image, N) of the U-Net's three resolutions
SMALL = ((64, 128),)
NOTES = (
    "Median milliseconds. GB/s and `of copy` take the least possible traffic of both passes, and compare it with a "
    "copy of a large tensor on the same device. A shape is measured on the same tensors again and again, which the "
    "caches hold if they are small."
)


def ways(on_gpu: bool, compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name -> a function (rows, 2 N) -> (rows, N)."""
    found = {"PyTorch": reference}
    if compiled:
        found["PyTorch, compiled"] = torch.compile(reference, dynamic=False)
    return found | ({"Triton": geglu} if on_gpu else {})


def row(
    name: str, way: Callable[[Tensor], Tensor], rows: int, width: int, seconds: float, rate: float, device: torch.device
) -> dict[str, Any]:
    """A row of the table."""
    x = torch.randn(rows, 2 * width, device=device, dtype=DTYPE, requires_grad=True)
    dy = torch.randn(rows, width, device=device, dtype=DTYPE)
    forward = milliseconds(lambda: way(x), seconds, device)
    both = milliseconds(lambda: torch.autograd.grad(way(x), x, dy), seconds, device)
    reached = 8 * rows * width * DTYPE.itemsize / (both / 1e3)  # 2 + 1 forward, 2 + 1 + 2 backward
    return {
        "shape": f"{rows}x{2 * width}",
        "way": name,
        "forward ms": round(forward, 4),
        "backward ms": round(both - forward, 4),
        "GB/s": round(reached / 1e9, 1),
        "of copy": f"{reached / rate:.0%}",
    }


def main(words: list[str] | None = None) -> None:
    device = training_device()
    gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=positive, default=64 if gpu else 2, help="images")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per measurement")
    parser.add_argument("--uncompiled", action="store_true", help="without compiled PyTorch")
    options = parser.parse_args(words)
    rate = copy_rate(device, options.seconds)
    rows = []
    for tokens, width in SD2 if gpu else SMALL:
        for name, way in ways(gpu, not options.uncompiled).items():
            try:
                rows.append(row(name, way, options.batch * tokens, width, options.seconds, rate, device))
            except Exception as error:  # a compiler that does not run here; the others still count
                shape = f"{options.batch * tokens}x{2 * width}"
                rows.append({"shape": shape, "way": name, "forward ms": reason(error)})
    write_results("geglu", "sd2" if gpu else "small", rows, NOTES)


if __name__ == "__main__":
    main()
