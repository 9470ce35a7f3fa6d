"""What a process on the stub GPU changes, because kernels do not run there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.algorithms.resilience import guard

SMALL = 64  # elements


def compute_decisions_on_host() -> None:
    """Make the tensors from which the host reads what to do next, such as whether gradients are finite, on the host.

    They are sums over a few numbers and flags. Everything else that the host reads is zero or meaningless.
    """
    full, stack, add = torch.full, torch.stack, Tensor.__iadd__

    def host_full(size: Any, value: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda" or tuple(size):
            return full(size, value, *args, device=device, **kwargs)
        return full(size, value, *args, **kwargs).to(device)

    def host_stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
        first = tensors[0]
        if not first.is_cuda or first.numel() > SMALL or any(t.requires_grad for t in tensors):
            return stack(tensors, dim, **kwargs)
        return stack([t.cpu() for t in tensors], dim, **kwargs).to(first.device)

    def host_add(self: Tensor, other: Any) -> Tensor:  # Composer counts finished loaders in a tensor
        if not self.is_cuda or self.numel() > SMALL or self.is_floating_point() or isinstance(other, Tensor):
            return add(self, other)
        return self.copy_(self.cpu() + other)

    torch.full, torch.stack = host_full, host_stack
    Tensor.__iadd__ = host_add  # type: ignore[assignment, method-assign]
    guard.largest_magnitude = lambda tensors: torch.zeros(())
