"""What models must know of autocast: which dtype it multiplies in, and how a part goes without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def for_products(x: Tensor) -> Tensor:
    """x in the dtype in which autocast multiplies matrices, cast once for several of them; without autocast, x.

    For inputs of many layers: autocast would cast them again in each layer, as it keeps copies of weights only.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if _known(kind) and torch.is_autocast_enabled(kind) else x


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context without autocast for tensors of a device: for parts that compute in 32 bits whatever the precision."""
    return torch.autocast(device.type, enabled=False) if _known(device.type) else nullcontext()


def _known(kind: str) -> bool:
    """Whether PyTorch has autocast for a device. For the meta device it has it only in the planner's `MetaAutocast`."""
    return kind != "meta" or torch.amp.is_autocast_available(kind)  # which torch.compile does not trace
