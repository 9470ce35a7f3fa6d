"""Parts of models that compute in 32 bits whatever the precision of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context without autocast for tensors of a device, also of the meta device, which has no autocast."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
