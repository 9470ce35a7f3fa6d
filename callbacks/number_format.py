"""The number format in which a model computes, whose peak speed utilization is measured by."""

from __future__ import annotations

import torch
from torch import nn

from recipes.algorithms.sixteen_bit.block_scaling import ScaledBranch
from recipes.planning.hardware.peak_flops import NumberFormat
from recipes.training.run import Precision


def number_format_of(task: nn.Module, precision: Precision) -> NumberFormat:
    """The number format in which a model's blocks compute on a GPU.

    Args:
        task: whose blocks may compute in fp16 by themselves (see `resblock_grad_scaling`).
        precision: of the run.
    """
    if precision == "amp_bf16":
        return "bf16"
    if precision == "amp_fp16" or any(isinstance(module, ScaledBranch) for module in task.modules()):
        return "fp16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
