"""Whether this process has a GPU of its own."""

from __future__ import annotations

import os
import platform

import torch

from data.cost import count_text


def check_own_gpu(key: str) -> None:
    """Find that this process has no GPU of its own, where PyTorch sees GPUs.

    Args:
        key: of the config that asks for a GPU, for the message.

    Raises:
        ValueError: its number on its machine is not that of a GPU.
    """
    local, count = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
    if local >= count:
        gpus = count_text(count, "GPU")
        raise ValueError(
            f"{key}: process {local} of {platform.node()} (LOCAL_RANK) has no GPU, as PyTorch sees {gpus} there; start "
            "one process per GPU, and let each see all GPUs of its machine (CUDA_VISIBLE_DEVICES)"
        )
