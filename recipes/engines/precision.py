"""The number formats of a run on its device, the same under all engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.training.run import Precision

FORMATS = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
# Instructions that multiply bf16 matrices: AVX512-BF16 and AMX of x86, BF16 of Arm.
BF16_FLAGS = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
CPU_FACTS = Path("/proc/cpuinfo")


def resolve(asked: str, *, use_gpu: bool) -> Precision:
    """The precision of a run on this machine.

    Args:
        asked: `training.precision` of the recipe.
        use_gpu: each rank trains on a GPU.
    """
    if asked == "auto":
        return "amp_bf16" if use_gpu else "fp32"
    if asked == "fastest":
        return "amp_bf16" if use_gpu or cpu_has_bf16() else "fp32"
    return asked


def cpu_has_bf16() -> bool:
    """Whether this machine's CPU multiplies bf16 matrices by instructions of its own."""
    return CPU_FACTS.is_file() and BF16_FLAGS.search(CPU_FACTS.read_text("utf-8")) is not None


@contextmanager
def autocast(device: torch.device, precision: Precision) -> Iterator[None]:
    """The autocast context of a precision on a device; under fp32 it turns autocast off.

    On a CPU, 16-bit attention is computed by matrix products: the backward pass of PyTorch's fused kernel does not use
    the CPU's bf16 instructions.
    """
    low = precision in FORMATS
    attention = sdpa_kernel([SDPBackend.MATH]) if low and device.type == "cpu" else nullcontext()
    with torch.autocast(device.type, dtype=FORMATS.get(precision), enabled=low), attention:
        yield


def gradient_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler | None:
    """The scaler of the loss and its gradients under amp_fp16; None under other precisions, which need none."""
    return torch.amp.GradScaler(device.type) if precision == "amp_fp16" else None


def allow_tf32() -> None:
    """Let GPUs compute products and convolutions of float32 numbers in TF32, as Composer does."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
