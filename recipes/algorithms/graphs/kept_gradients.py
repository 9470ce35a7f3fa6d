"""Gradients that CUDA graphs have written, kept from one microbatch to the next."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class KeptGradients:
    """Memory for the gradients of several microbatches of graphs, which write to the same memory in each.

    A batch of one microbatch needs none: autograd makes its gradients those of the parameters as they are, which saves
    a kernel per parameter.

    Attributes:
        copies: id of a parameter -> the memory in which its gradients are summed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Each once, and now: looking for them in all modules takes a millisecond per step for a large model.
        self.parameters = list(parameters)
        self.copies: dict[int, Tensor] = {}

    def before_forward(self) -> None:
        """Copy the gradients of the microbatch before, if there is one in this batch, out of the memory of graphs.

        Later microbatches are added to these copies.
        """
        with_gradient = (p for p in self.parameters if p.grad is not None)
        new = {id(p): p for p in with_gradient if p.grad is not self.copies.get(id(p))}
        if not new:
            return
        for key, parameter in new.items():
            if key not in self.copies:
                self.copies[key] = torch.empty_like(parameter)
        kept = [self.copies[key] for key in new]
        torch._foreach_copy_(kept, [parameter.grad for parameter in new.values()])
        for parameter, gradient in zip(new.values(), kept, strict=True):
            parameter.grad = gradient
