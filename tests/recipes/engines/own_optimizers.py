"""Optimizers as users may add them, with states that PyTorch's own do not have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer


class OddStates(Optimizer):
    """Moments of 16 bits, integers, flags, nested tensors and plain values, on which each update depends."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        """
        Args:
            lr: peak learning rate.
        """
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["count"] = torch.full_like(p, 2**24 + 1, dtype=torch.int64)  # no number of 32-bit floats
                    state |= {"seen": torch.zeros_like(p, dtype=torch.bool), "older": [torch.zeros_like(p)], "steps": 0}
                    state |= {"modes": ["up", "down"], "none": None}
                state["mean"].mul_(0.9).add_(p.grad.bfloat16(), alpha=0.1)
                state["count"] += 2
                state["seen"] |= p.grad > 1e-3
                state["steps"] += 1
                update = state["mean"].float() + state["older"][0] / state["steps"] + state["count"] % 2 * 1e-3
                state["older"][0].copy_(p.grad)
                state["modes"].reverse()
                update += {"up": 1e-4, "down": -1e-4}[state["modes"][0]]
                p.sub_(torch.where(state["seen"], update, update / 2), alpha=group["lr"])


class Scalars(Optimizer):
    """One number per parameter, and no other tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        """
        Args:
            lr: peak learning rate.
        """
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                variance = self.state[p].setdefault("variance", torch.zeros(()))
                variance.lerp_(p.grad.square().mean(), 0.1)
                p.sub_(p.grad / (variance.sqrt() + 1e-8), alpha=group["lr"])


class DecaysApart(Optimizer):
    """Decay that the learning rate does not multiply, a count of steps in its group, and later also a momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        """
        Args:
            lr: peak learning rate.
        """
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p.mul_(0.99).sub_(p.grad, alpha=group["lr"] / group["steps"])
                if group["steps"] > 2:
                    p.sub_(self.state[p].setdefault("momentum", p.grad.clone()), alpha=group["lr"])


def of_matrices(parameters: Iterable[nn.Parameter], *, lr: float) -> Optimizer:
    """
    Args:
        lr: peak learning rate of matrices; vectors have a tenth of it.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.ndim > 1].append(parameter)
    if not all(groups.values()):
        raise ValueError("of_matrices: no matrices, or no vectors")
    return torch.optim.SGD([{"params": groups[True]}, {"params": groups[False], "lr": lr / 10}], lr=lr, momentum=0.9)


def with_hook(parameters: Iterable[nn.Parameter], *, lr: float) -> Optimizer:
    """Of a class that a function makes.

    Args:
        lr: peak learning rate.
    """

    class Hooked(torch.optim.Adam):
        pass

    optimizer = Hooked(parameters, lr=lr)
    optimizer.register_step_post_hook(_draw_to_older_weights)
    return optimizer


@torch.no_grad()
def _draw_to_older_weights(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            older = optimizer.state[p].setdefault("older", p.bfloat16())
            p.lerp_(older.lerp_(p.bfloat16(), 0.5).float(), 0.1)


def of_last_layer(parameters: Iterable[nn.Parameter], *, lr: float) -> Optimizer:
    """
    Args:
        lr: peak learning rate.
    """
    return torch.optim.SGD(list(parameters)[-2:], lr=lr)


def by_names(parameters: Iterable[nn.Parameter], task: nn.Module, *, lr: float) -> Optimizer:
    """
    Args:
        lr: peak learning rate.
    """
    return torch.optim.SGD([{"params": [parameter]} for _, parameter in task.named_parameters()], lr=lr)


def by_part(parameters: Iterable[nn.Parameter], task: nn.Module, *, lr: float) -> Optimizer:
    """
    Args:
        lr: peak learning rate; the first parameter of the model has a tenth of it.
    """
    first = next(iter(task.parameters()))
    rest = [parameter for parameter in parameters if parameter is not first]
    return torch.optim.SGD([{"params": rest}, {"params": [first], "lr": lr / 10}], lr=lr)


def adafactor(parameters: Iterable[nn.Parameter], *, lr: float) -> Optimizer:
    """
    Args:
        lr: peak learning rate.
    """
    return torch.optim.Adafactor(parameters, lr=lr)
