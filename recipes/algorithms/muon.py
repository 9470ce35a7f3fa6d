"""Muon (Jordan et al. 2024): momentum whose singular values are all made about 1 before it is added to the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from recipes.algorithms.sharding.shards import as_shard, own, shard_of, whole
from recipes.training.ranks import all_reduce, rank, world_size

# Of the quintic a x + b x^3 + c x^5, which brings values in (0, 1] to 0.7 to 1.2 in five iterations (Jordan et al.).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Number of elements of the matrices that are made orthogonal at a time: enough for a GPU, and little memory.
TOGETHER = 2**25
EPS = 1e-7  # for gradients of 0


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model, and AdamW (Loshchilov and Hutter 2019) for all other parameters.

    Each parameter group chooses by `matrices`. A kernel of a convolution (C, D, ...) is a matrix of C rows. Parameters
    may be ordinary tensors or shards (DTensor), whose state has the same placements. Of sharded matrices, each rank
    gathers the whole momentum. Each rank makes a part of the matrices orthogonal, and then all exchange these.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        matrices: bool = True,
    ) -> None:
        """
        Args:
            parameters: float32 tensors, or parameter groups, which may have their own `matrices`.
            lr: learning rate, for groups without their own. The singular values of a matrix's update are about
                lr * sqrt(max(1, rows / columns)), whatever its gradients.
            momentum: decay of the running mean of a matrix's gradient, which is used as Nesterov's.
            betas: decays of AdamW's running mean and of its running variance.
            eps: added to the square root of the variance.
            weight_decay: decoupled decay, times the learning rate.
            matrices: whether Muon or AdamW updates a group, for groups without their own.

        Raises:
            ValueError: values out of range, parameters that are not float32, or vectors in a group for Muon.
        """
        settings = {
            "lr": lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "matrices": matrices,
            "fused": True,  # AdamW; PyTorch then loads its counts of steps to the device of the parameter
        }
        super().__init__(parameters, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch. Raises a ValueError as the constructor does."""
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient. Every rank must call it, with equal gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if any(parameter.grad.is_sparse for parameter in trained):
                raise ValueError("muon: sparse gradients are not supported; use dense embeddings")
            if group["matrices"]:
                self._update_matrices(group, trained)
            elif trained:
                self._update_others(group, trained)
        return loss

    def _update_matrices(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        lists = _alike(trained)
        parts = []
        turn = 0  # of the ranks, one matrix each
        for parameters in lists:
            updates = self._momentum(parameters, group["momentum"])
            mine = slice((rank() - turn) % world_size(), None, world_size())
            parts.append((mine, orthogonal(torch.stack(updates[mine])) if updates[mine] else None))
            turn += len(parameters)
        lr = float(group["lr"])
        # After all have been computed, so that ranks need not wait for each other in each list.
        for parameters, (mine, part) in zip(lists, parts, strict=True):
            rows, columns = _shape(parameters[0])
            found = _of_all_ranks(mine, part, parameters).float()
            shards = [shard_of(p, one.reshape(p.shape)) for p, one in zip(parameters, found, strict=True)]
            values = [own(parameter) for parameter in parameters]
            torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
            torch._foreach_add_(values, shards, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def _momentum(self, parameters: list[Tensor], decay: float) -> list[Tensor]:
        """The whole momentum of each parameter, as Nesterov's, (rows, columns)."""
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        means = [own(self.state[parameter]["momentum"]) for parameter in parameters]
        gradients = [own(parameter.grad) for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - decay)
        updates = torch._foreach_lerp(gradients, means, decay)
        found = []
        for parameter, update in zip(parameters, updates, strict=True):
            update = whole(as_shard(parameter, update)) if isinstance(parameter, DTensor) else update
            found.append(update.reshape(_shape(parameter)))
        return found

    def _update_others(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        for parameter in trained:
            if "exp_avg" not in self.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update({"step": step, **moments})
        states = [self.state[parameter] for parameter in trained]
        adamw(
            [own(parameter) for parameter in trained],
            [own(parameter.grad) for parameter in trained],
            *([own(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],  # maxima, of AMSGrad
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices whose singular values are 1, approximately: singular values above 0 become 0.7 to 1.2.

    Five iterations of a polynomial instead of a singular value decomposition (Jordan et al. 2024). Very small singular
    values, relative to the largest one, stay smaller.

    Args:
        matrices: (N, R, C) float32.

    Returns:
        (N, R, C) bfloat16 on a GPU, in which the products are computed there, and float32 elsewhere.
    """
    a, b, c = COEFFICIENTS
    upright = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if upright else matrices
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=EPS)  # so that all are at most 1
    found = found.to(_dtype_of_products(matrices.device))
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if upright else found


def flop(parameter: Tensor) -> int:
    """Floating-point operations of `orthogonal` for a parameter."""
    short, long = sorted(_shape(parameter))
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


def _of_all_ranks(mine: slice, part: Tensor | None, parameters: list[Tensor]) -> Tensor:
    """The matrices of all ranks.

    Args:
        mine: which ones this rank has.
        part: those of this rank, if there are any.
        parameters: of which they are updates.

    Returns:
        (N, rows, columns), for N parameters.
    """
    if world_size() == 1:
        return part
    device = own(parameters[0]).device
    found = torch.zeros(len(parameters), *_shape(parameters[0]), dtype=_dtype_of_products(device), device=device)
    if part is not None:
        found[mine] = part
    all_reduce(found)
    return found


def _dtype_of_products(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _alike(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Matrices of the same shape, in lists of at most `TOGETHER` elements or one matrix."""
    lists: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    for parameter in parameters:
        found = lists.setdefault((_shape(parameter), parameter.device), [[]])
        if found[-1] and (len(found[-1]) + 1) * parameter.numel() > TOGETHER:
            found.append([])
        found[-1].append(parameter)
    return [part for found in lists.values() for part in found]


def _shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix."""
    return parameter.shape[0], parameter.shape[1:].numel()


def _check(group: dict[str, Any]) -> None:
    lr, eps, decay = float(group["lr"]), group["eps"], group["weight_decay"]
    if lr < 0 or eps < 0 or decay < 0:
        raise ValueError(f"muon: lr, eps and weight_decay must not be negative, got {lr}, {eps} and {decay}")
    decays = {"momentum": group["momentum"], "betas.0": group["betas"][0], "betas.1": group["betas"][1]}
    for key, value in decays.items():
        if not 0 <= value < 1:
            raise ValueError(f"muon: {key} must lie in [0, 1), got {value}")
    for parameter in group["params"]:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"muon: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; keep parameters in 32-bit, "
                "and set the precision of computation by training.precision"
            )
        if group["matrices"] and parameter.ndim < 2:
            raise ValueError(f"muon: a parameter of shape {tuple(parameter.shape)} is no matrix; leave it to AdamW")
