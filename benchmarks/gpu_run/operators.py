"""Where the time of one training step goes, by operator, from PyTorch's profiler."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from composer import Callback as ComposerCallback
from composer import Logger, State
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROWS = 15
# Words of a kernel's name -> what it does; the first that fits.
KINDS = (
    ("attention", ("flash", "fmha", "attention", "flex", "softmax", "sdpa")),
    ("convolution", ("conv", "wgrad", "dgrad", "fprop", "implicit")),
    ("matrix product", ("gemm", "nvjet", "cutlass", "cublas", "matmul", "_mm", "xmma")),
    ("norm", ("norm", "_forward", "_backward", "rowwisemoments")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm")),
    ("communication", ("nccl",)),
    ("copy and cast", ("copy", "memcpy", "memset", "cat", "transpose", "nchwtonhwc", "nhwctonchw")),
    ("elementwise and reductions", ("elementwise", "reduce", "triton", "vectorized", "index", "gelu", "silu")),
)


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
            kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
            self.profiler = profile(activities=kinds)
            self.profiler.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.profiler is not None and state.timestamp.batch.value == self.step + 1:
            if state.device.name == "gpu":
                torch.cuda.synchronize()
            self.profiler.stop()


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


def busy(profiler: profile) -> dict[str, Any]:
    """How much of the step the GPU computes, and with what, in milliseconds; empty without a GPU."""
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    kernels = [event for event in kernels if is_work(event, event.name)]
    if not kernels:
        return {}
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    kinds: dict[str, float] = defaultdict(float)
    for event in kernels:
        kinds[kind_of(event.name)] += event.time_range.elapsed_us()
    length = until - spans[0][0]
    parts = sorted(kinds.items(), key=lambda item: -item[1])
    return {
        "kernels": len(kernels),
        "ms from the first to the last": round(length / 1e3, 2),
        "GPU computes": f"{covered / length:.1%}",
        **{kind: f"{value / 1e3:.2f} ms" for kind, value in parts},
    }


def is_work(event: Any, name: str) -> bool:
    """Whether an event is a kernel or an operator, and not a span around some."""
    return not getattr(event, "is_user_annotation", False) and not name.startswith(SPANS)


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


def write_trace(profiler: profile, path: Path) -> None:
    """Write what chrome://tracing and Perfetto open, compressed."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
