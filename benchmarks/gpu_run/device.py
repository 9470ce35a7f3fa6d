"""What the machine is: whether everything can be imported, and the highest rates that the GPU reaches."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.gpu_run.context import Context
from recipes.planning.hardware.peak_flops import NumberFormat, peak_flops

TABLE = "The machine"
# What the steps import. The server process imports all of it once, and each step is a fork of it.
MODULES = (
    "triton",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "composer",
    "diffusers",
    "data.tokenizers.clip_library",  # open_clip without wandb, which would take a minute
    "streaming",
    "pytest",
    "recipes.engines.composer.trainer",
    "benchmarks.adam16",
    "benchmarks.decoder",
    "benchmarks.ema",
    "benchmarks.geglu",
    "benchmarks.muon",
    "benchmarks.norms",
    "benchmarks.powersgd_cost",
    "benchmarks.common.random_encoders",
    "benchmarks.common.steady",
    "benchmarks.common.training",
    "benchmarks.gpu_run.numbers",
    "benchmarks.gpu_run.operators",
    "benchmarks.gpu_run.suite",
    "benchmarks.gpu_run.trained",
)


def failed_imports(modules: Iterable[str] = MODULES) -> list[str]:
    """One line for each module that cannot be imported here."""
    found = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a package that does not load fails in its own way
            found.append(f"{module}: {type(error).__name__}: {error}")
    return found


def machine(context: Context) -> None:
    """Imports, memory, and the rates of a copy and of matrix products, by which the other tables can be judged."""
    for line in failed_imports():
        context.records.row(TABLE, {"what": "import", "found": f"FAILED {line}"})
    device = context.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts: dict[str, Any] = {
            "GPU": properties.name,
            "memory, GB": round(properties.total_memory / 1e9, 1),
            "multiprocessors": properties.multi_processor_count,
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA of PyTorch": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": str(torch.cuda.nccl.version()),
        }
        for what, value in facts.items():
            context.records.row(TABLE, {"what": what, "found": value})
    side = 256 if context.small else 8192
    formats: tuple[NumberFormat, ...] = ("bf16", "fp16", "fp32", "tf32")
    for number_format in formats if device.type == "cuda" else formats[:3]:
        rate, peak = matmul_rate(side, number_format, device), peak_of(device, number_format)
        share = f", {rate / peak:.0%} of the data sheet's {peak / 1e12:,.0f}" if peak else ""
        what = f"{side:,} x {side:,} matrix product, {number_format}"
        found = f"{rate / 1e12:,.3g} TFLOP/s{share}"
        context.records.row(TABLE, {"what": what, "found": found}, number_format=number_format, flops_per_second=rate)
    count = 2**20 if context.small else 2**32
    source = torch.randint(255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    context.records.row(TABLE, {"what": "copy, read and written", "found": f"{2 * count / seconds / 1e9:,.0f} GB/s"})


def lightning(context: Context) -> None:
    """Whether the second engine can be imported, which no other step needs.

    Raises:
        ImportError: it cannot.
    """
    failed = failed_imports(["recipes.engines.lightning.trainer"])
    if failed:
        raise ImportError(failed[0])


def matmul_rate(side: int, number_format: NumberFormat, device: torch.device) -> float:
    """FLOP/s of a square product of random matrices."""
    torch.backends.cuda.matmul.allow_tf32 = number_format == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(number_format, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device)


def measured_rate(context: Context, number_format: NumberFormat) -> float | None:
    """FLOP/s of a large matrix product, as the step `machine` has measured it here; None if it has not."""
    rows = context.records.rows(TABLE)
    return next((row["flops_per_second"] for row in rows if row.get("number_format") == number_format), None)


def median_seconds(work: Any, device: torch.device) -> float:
    """Median seconds of a call, after three calls that are not counted."""
    from benchmarks.common.timing import milliseconds

    return milliseconds(work, 0.2 if device.type == "cuda" else 0.02, device) / 1e3


def peak_of(device: torch.device, number_format: NumberFormat) -> float | None:
    """The data sheet's FLOP/s of dense products; None for a CPU and for GPUs that are not known."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), number_format)
