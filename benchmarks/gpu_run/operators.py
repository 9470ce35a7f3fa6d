"""Where the time of one training step goes, by operator, from PyTorch's profiler."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback as ComposerCallback
from composer import Logger, State
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_run.context import Context

ROWS = 15
# Words of a kernel's name, or of an operator's of PyTorch -> what it does; the first that fits.
KINDS = (
    ("attention", ("flash", "fmha", "attention", "flex", "softmax", "sdpa")),
    ("convolution", ("conv", "wgrad", "dgrad", "fprop", "implicit")),
    (
        "matrix product",
        ("gemm", "nvjet", "cutlass", "cublas", "matmul", "_mm", "xmma", "::mm", "::bmm", "::addmm", "::linear"),
    ),
    ("norm", ("norm", "rowwisemoments")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm")),
    ("communication", ("nccl",)),
    ("copy and cast", ("copy", "memcpy", "memset", "cat", "transpose", "nchwtonhwc", "nhwctonchw")),
    ("elementwise and reductions", ("elementwise", "reduce", "triton", "vectorized", "index", "gelu", "silu", "geglu")),
)
# Of inductor, whose names list all that was fused: also operations next to which a kernel ran, such as convolutions.
GENERATED = ("triton_poi_", "triton_red_", "triton_per_")
PRODUCTS = ("attention", "convolution", "matrix product")
MEMORY = ("norm", "optimizer", "copy and cast", "elementwise and reductions")
BUSY = 0.95  # share of a step in which a GPU computes that is not kept waiting

# Spans that the profiler shows among the kernels: of the optimizer's step, of a compiled graph.
SPANS = ("Optimizer.", "ProfilerStep", "##", "Torch-Compiled", "CompiledFunction")


class OneStep(ComposerCallback):
    """Profiles one step of a Composer run.

    Attributes:
        profiler: of that step; None before it.
    """

    def __init__(self, step: int) -> None:
        """
        Args:
            step: number of the step.
        """
        self.step = step
        self.profiler: profile | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step:
            gpu = state.device.name == "gpu"
            if gpu:
                torch.cuda.synchronize()
            self.profiler = new_profiler(gpu)
            self.profiler.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.profiler is not None and state.timestamp.batch.value == self.step + 1:
            if state.device.name == "gpu":
                torch.cuda.synchronize()
            self.profiler.stop()


def new_profiler(gpu: bool) -> profile:
    """A profiler of operators and, on a GPU, of kernels."""
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])])


def operator_rows(profiler: profile) -> list[dict[str, Any]]:
    """The operators that take most time of the device themselves; without a GPU, of the CPU."""
    averages = profiler.key_averages()
    gpu = any(event.self_device_time_total > 0 for event in averages)

    def own(event: Any) -> float:
        return event.self_device_time_total if gpu else event.self_cpu_time_total

    # A kernel's time is its own and that of the operator that launched it: only the kernels count here.
    events = [e for e in averages if own(e) > 0 and (not gpu or e.device_type != DeviceType.CPU) and is_work(e, e.key)]
    whole = sum(own(event) for event in events)
    return [
        {
            "kernel" if gpu else "operator": event.key[:90],
            "calls": event.count,
            "ms": round(own(event) / 1e3, 3),
            "share": f"{own(event) / whole:.1%}",
        }
        for event in sorted(events, key=own, reverse=True)[:ROWS]
    ]


@dataclass(frozen=True)
class Kernels:
    """What a GPU does in a step, in microseconds.

    Attributes:
        count: number of kernels.
        length: from the beginning of the first to the end of the last.
        covered: of `length`, when at least one runs.
        kinds: the kernels' own times by what they do, the longest first.
    """

    count: int
    length: float
    covered: float
    kinds: dict[str, float]


def kernels_of(profiler: profile) -> Kernels | None:
    """The kernels of the profiled step; None without a GPU."""
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    kernels = [event for event in kernels if is_work(event, event.name)]
    if not kernels:
        return None
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    kinds: dict[str, float] = defaultdict(float)
    for event in kernels:
        kinds[kind_of(event.name)] += event.time_range.elapsed_us()
    parts = sorted(kinds.items(), key=lambda item: -item[1])
    return Kernels(len(kernels), until - spans[0][0], covered, dict(parts))


def busy(kernels: Kernels) -> str:
    """How much of the profiled step the GPU computes, and with what, as a sentence."""
    shares = {
        "kernels": kernels.count,
        "ms from the first to the last": round(kernels.length / 1e3, 2),
        "GPU computes": f"{kernels.covered / kernels.length:.1%}",
        **{kind: f"{value / 1e3:.2f} ms" for kind, value in kernels.kinds.items()},
    }
    return ", ".join(f"{what}: {value}" for what, value in shares.items()) + "."


def bound_by(kernels: Kernels, seconds: float, flops: float, product_rate: float | None) -> str:
    """What limits the speed of a step: the host, matrix products or memory.

    Args:
        kernels: of a profiled step.
        seconds: of a step that is not profiled: the profiler slows the host, but not the kernels.
        flops: that the model needs in a step.
        product_rate: FLOP/s of a large matrix product in the step's number format; None if it is not known.
    """
    computing = kernels.covered / 1e6 / seconds
    if computing < BUSY:
        return f"host: the GPU computes {computing:.0%} of the time"
    whole = sum(kernels.kinds.values())
    products = sum(kernels.kinds.get(kind, 0.0) for kind in PRODUCTS)
    memory = sum(kernels.kinds.get(kind, 0.0) for kind in MEMORY)
    if products >= whole / 2:
        rate = f", at {flops / (products / 1e6) / product_rate:.0%} of a large product's rate" if product_rate else ""
        return f"products: {products / whole:.0%} of the kernels' time{rate}"
    if memory >= whole / 2:
        return f"memory: {memory / whole:.0%} of the kernels' time"
    return f"no one thing: products {products / whole:.0%}, memory {memory / whole:.0%} of the kernels' time"


def is_work(event: Any, name: str) -> bool:
    """Whether an event is a kernel or an operator, and not a span around some."""
    return not getattr(event, "is_user_annotation", False) and not name.startswith(SPANS)


def kind_of(kernel: str) -> str:
    """What a kernel or an operator does, by its name."""
    name = kernel.lower()
    if name.startswith(GENERATED):
        return "norm" if "norm" in name else "elementwise and reductions"
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


def write_profile(context: Context, profiler: profile, kernels: Kernels | None, table: str, trace: str) -> None:
    """Keep what a step does as a table, and as a trace in the run's folder."""
    for row in operator_rows(profiler):
        context.records.row(table, row)
    if kernels is not None:
        context.records.note(table, busy(kernels))
    write_trace(profiler, context.folder / trace)


def write_trace(profiler: profile, path: Path) -> None:
    """Write what chrome://tracing and Perfetto open, compressed."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
