"""The memory format of pictures, and the number format of autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def format_of(x: Tensor) -> torch.memory_format:
    """channels_last if a tensor (B, C, h, w) is in it, also where both formats are the same; else contiguous."""
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def in_autocast_dtype(x: Tensor) -> Tensor:
    """A tensor in the dtype of autocast; the tensor itself where autocast is off.

    For inputs of many layers: autocast would cast them again in each layer, as it keeps copies of weights only.
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast raises for the meta device
        return x
    return x.to(torch.get_autocast_dtype(kind))
