"""What models must know of autocast: which dtype it multiplies in."""

from __future__ import annotations

import torch
from torch import Tensor


def for_products(x: Tensor) -> Tensor:
    """x in the dtype in which autocast multiplies matrices, cast once for several of them; without autocast, x."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
