"""The memory format of pictures."""

from __future__ import annotations

import torch
from torch import Tensor


def format_of(x: Tensor) -> torch.memory_format:
    """channels_last if a tensor (B, C, h, w) is in it, also where both formats are the same; else contiguous."""
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
