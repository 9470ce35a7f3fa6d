"""Optimizers that recipes name.

`recipes.config.build` passes the parameters before `*` by name; those after it are the YAML's keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from data.cost import FLOAT, Cost, Plan, all_reduce_bytes, count_text, size_text, with_cost
from data.ranges import check_least
from recipes.algorithms.gradients.blocks import block_matrices, matrices_of
from recipes.algorithms.muon import Muon, flop
from recipes.algorithms.sixteen_bit.adam16 import Adam16


def adamw_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Two 32-bit moments of each trained parameter, see `data.cost`."""
    size = 2 * FLOAT * plan.trained
    return Cost(device_bytes=size * plan.share, checkpoint_bytes=size, note="two moments in fp32")


@with_cost(adamw_cost)
def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_vectors: bool = True,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """PyTorch's AdamW (Loshchilov and Hutter 2019).

    Args:
        lr: peak learning rate; the schedule multiplies it by a factor from 0 to 1.
        betas: decays of the running mean and of the running variance.
        eps: added to the root of the variance.
        weight_decay: decoupled decay, times the learning rate.
        decay_vectors: whether weight decay also applies to parameters of fewer than two dimensions: gains, biases, and
            scalars such as the temperature of a contrastive model. Megatron-LM and open_clip do not apply it to these.
        fused: update all parameters in one kernel, on GPUs and CPUs, sharded or not; equal up to 32-bit rounding.

    Raises:
        ValueError: a number out of range.
    """
    check_least("adamw", 0, lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas must lie in [0, 1), got {list(betas)}")
    groups = [{"params": list(parameters)}]
    if not decay_vectors:
        trained = groups[0]["params"]
        matrices = {"params": [p for p in trained if p.ndim >= 2]}
        vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


def adam16_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Two moments of each trained parameter, in 16 bits for the blocks' matrices; see `data.cost`."""
    low = sum(p.numel() for matrices in block_matrices(plan.task, "adam16") for p in matrices)
    size = 2 * (2 * low + FLOAT * (plan.trained - low))
    note = "two moments in fp32 (in 16 bits for the blocks' matrices)"
    return Cost(device_bytes=size * plan.share, checkpoint_bytes=size, note=note)


@with_cost(adam16_cost)
def adam16(
    parameters: Iterable[torch.nn.Parameter],
    task: torch.nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.96),
    eps: float = 1e-8,
    weight_decay: float = 0.045,
    variance_clip: float | None = 5.0,
    compiled: bool = True,
) -> torch.optim.Optimizer:
    """AdamW with 16-bit moments (1-6-9 and 0-6-10) for the matrices of the model's blocks (Ramesh et al. 2021).

    Gains, biases, embeddings and unembeddings keep 32-bit moments. The blocks are those of `Task.blocks`.

    Args:
        lr: peak learning rate; the schedule multiplies it by a factor from 0 to 1.
        betas: decays of the running mean and of the running variance.
        eps: added to the root of the variance.
        weight_decay: decoupled decay, times the learning rate.
        variance_clip: upper bound of the running variance of the gradients that the optimizer gets; null: none.
        compiled: update all tensors in one kernel on a GPU; on a CPU one kernel per tensor, compiled at the first step.
    """
    inside = {id(p) for matrices in block_matrices(task, "adam16") for p in matrices}
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if id(p) in inside], "moment_bits": 16},
        {"params": [p for p in trained if id(p) not in inside], "moment_bits": 32},
    ]
    return Adam16(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        variance_clip=variance_clip,
        compiled=compiled,
    )


def muon_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """One 32-bit moment of each matrix that Muon updates and two of all other parameters, see `data.cost`."""
    matrices = _muon_matrices(plan.task, args.get("matrices", "blocks"))
    low = sum(p.numel() for p in matrices)
    size = FLOAT * (low + 2 * (plan.trained - low))
    note = "one moment in fp32 of matrices, two of other parameters"
    flops, devices = sum(map(flop, matrices)), plan.replicas * plan.shards
    line = f"{flops / 1e12:.3g} TFLOP per step for {count_text(len(matrices), 'matrix', 'matrices')}"
    sent = all_reduce_bytes(2 * low, devices) + FLOAT * low * (plan.shards - 1) / plan.shards  # shards are gathered
    if devices > 1:
        line += f", divided over {devices} devices, which exchange {size_text(2 * low)} in bf16"
    return Cost(
        device_bytes=size * plan.share,
        checkpoint_bytes=size,
        update_flops=flops / devices,
        update_bytes=sent,
        note=note,
        lines=(line,),
    )


@with_cost(muon_cost)
def muon(
    parameters: Iterable[torch.nn.Parameter],
    task: torch.nn.Module,
    *,
    lr: float,
    adamw_lr: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    matrices: Literal["blocks", "all"] = "blocks",
) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for the model's matrices, and AdamW for all other parameters.

    The momentum of a matrix is replaced by one whose singular values are all about 1. Embeddings, gains and biases are
    always updated by AdamW.

    Args:
        lr: peak learning rate of matrices, which is also about the largest singular value of an update; the schedule
            multiplies it by a factor from 0 to 1.
        adamw_lr: peak learning rate of all other parameters.
        momentum: decay of the running mean of the gradients of matrices.
        betas: AdamW's decays of the running mean and of the running variance.
        eps: AdamW's summand of the root of the variance.
        weight_decay: decoupled decay, times the learning rate.
        matrices: those that Muon updates. blocks: those of the model's blocks (`Task.blocks`), as usual for
            transformers; all: also those outside, such as the first and the last convolution of an autoencoder.
    """
    by_muon = {id(p) for p in _muon_matrices(task, matrices)}
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if id(p) in by_muon], "matrices": True},
        {"params": [p for p in trained if id(p) not in by_muon], "matrices": False, "lr": adamw_lr},
    ]
    return Muon(
        [group for group in groups if group["params"]],
        lr=lr,
        momentum=momentum,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
    )


def _muon_matrices(task: nn.Module, which: str) -> list[nn.Parameter]:
    if which == "blocks":
        return [p for matrices in block_matrices(task, "muon") for p in matrices]
    return matrices_of(task)
