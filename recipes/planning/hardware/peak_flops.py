"""The peak speed of GPUs, by which utilization is measured."""

from __future__ import annotations

import re
from typing import Literal

NumberFormat = Literal["fp32", "tf32", "bf16", "fp16"]

# Words of a GPU's name -> TFLOP/s of dense products (without sparsity, with sums in 32 bits), by NVIDIA's data sheets.
# The first entry whose words all occur in the name is taken.
PEAKS: dict[tuple[str, ...], dict[NumberFormat, float]] = {
    ("b200",): {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250},
    ("gb200",): {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500},
    ("gh200",): {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    ("h200", "nvl"): {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    ("h200",): {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    ("h100", "pcie"): {"fp32": 51, "tf32": 378, "bf16": 756.5, "fp16": 756.5},
    ("h100", "nvl"): {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    ("h100",): {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    ("a100",): {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    ("l40s",): {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    ("l40",): {"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp16": 181},
    ("l4",): {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    ("a10g",): {"fp32": 35, "tf32": 35, "bf16": 70, "fp16": 70},
    ("a10",): {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    ("v100s",): {"fp32": 16.4, "fp16": 130},
    ("v100", "pcie"): {"fp32": 14, "fp16": 112},
    ("v100",): {"fp32": 15.7, "fp16": 125},
    ("t4",): {"fp32": 8.1, "fp16": 65},
    ("rtx", "a6000"): {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    ("rtx", "4090"): {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2},
    ("rtx", "3090"): {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
}
OTHER_THAN_ITS_NAME = {"mig", "laptop", "ti", "d"}  # a part of a GPU, and slower or faster GPUs of the same name


def peak_flops(gpu: str, number_format: NumberFormat) -> float | None:
    """The peak FLOP/s of a GPU in dense matrix products; None if the table does not have it.

    Args:
        gpu: as `torch.cuda.get_device_name()` returns it, such as "NVIDIA A100-SXM4-40GB".
        number_format: of the factors.
    """
    words = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).split()
    if OTHER_THAN_ITS_NAME & set(words):
        return None
    for name, peaks in PEAKS.items():
        if set(name) <= set(words):
            return peaks[number_format] * 1e12 if number_format in peaks else None
    return None
