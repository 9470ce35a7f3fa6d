"""Builders of components that come from the libraries (nearly) as they are: optimizers, schedules, loggers, callbacks.

Parameters before `*` are handed over by `recipes.config.build` by their name; those after it are the YAML's keys.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from composer import Callback, State
from composer.callbacks import LRMonitor, MemoryMonitor
from composer.loggers import LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.optim import ComposerScheduler, ConstantWithWarmupScheduler
from composer.optim import LinearWithWarmupScheduler as LinearWithWarmup

from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.cost import FLOAT, Cost, Plan, with_cost
from recipes.algorithms.averaging.scheduled_ema import measure
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.sixteen_bit.adam16 import Adam16


def adamw_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Two 32-bit moments of each trained parameter, see `data.cost`."""
    size = 2 * FLOAT * plan.trained
    return Cost(device_bytes=size / plan.shards, checkpoint_bytes=size, note="two moments in fp32")


@with_cost(adamw_cost)
def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """PyTorch's AdamW (Loshchilov and Hutter 2019).

    Args:
        lr: learning rate that the schedule multiplies.
        betas: decays of the running mean and of the running variance.
        eps: added to the root of the variance.
        weight_decay: decoupled decay, times the learning rate.
        fused: one kernel for all parameters, on GPUs and CPUs, sharded or not; steps are the same to 32-bit rounding.
    """
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


def adam16_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Two moments of each trained parameter, in 16 bits for the blocks' matrices; see `data.cost`."""
    low = sum(p.numel() for matrices in block_matrices(plan.task, "adam16") for p in matrices)
    size = 2 * (2 * low + FLOAT * (plan.trained - low))
    note = "two moments in fp32 (in 16 bits for the blocks' matrices)"
    return Cost(device_bytes=size / plan.shards, checkpoint_bytes=size, note=note)


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

    Gains, biases, embeddings and unembeddings keep moments in 32-bit. The model says which modules are its blocks.

    Args:
        lr: learning rate that the schedule multiplies.
        betas: decays of the running mean and of the running variance.
        eps: added to the root of the variance.
        weight_decay: decoupled decay, times the learning rate.
        variance_clip: largest running variance, of gradients as the optimizer gets them; null: none.
        compiled: one kernel for all tensors on a GPU; on a CPU one a tensor, compiled at the first step.
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


def constant(*, warmup: Duration = "0ba") -> ComposerScheduler:
    """A constant learning rate after a linear warm-up.

    Args:
        warmup: length of the warm-up.
    """
    return ConstantWithWarmupScheduler(t_warmup=warmup)


def cosine(*, warmup: Duration = "0ba", final: float = 0.0, over: Duration = "1dur") -> ComposerScheduler:
    """A linear warm-up, then half a cosine to the end of the run or of `over`, and constant from there on.

    Args:
        warmup: length of the warm-up.
        final: learning rate at the end, as a share of the peak.
        over: length of the warm-up and the cosine together.
    """
    return Cosine(warmup, final, over)


class Cosine(ComposerScheduler):
    """See `cosine`. Composer's own refuses a cosine that ends before the run does."""

    def __init__(self, warmup: str, final: float, over: str) -> None:
        self.warmup, self.final, self.over = warmup, final, over

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """What the learning rate is multiplied by.

        Args:
            state: has the time, and the length of the run.
            ssr: Composer's stretch of all durations.

        Raises:
            ValueError: a warm-up in other units than the cosine.
        """
        over, unit = measure(self.over, state)
        warmup, warmup_unit = measure(self.warmup, state)
        if warmup and warmup_unit != unit:
            raise ValueError(
                f"schedule: a warm-up of {self.warmup} cannot be taken from {self.over} of a run of "
                f"{state.max_duration.to_timestring()}; give both in the same unit"
            )
        passed = state.timestamp.get(unit).value
        if passed < warmup:
            return passed / warmup
        length = over * ssr - warmup  # none in a run that ends within the warm-up
        share = min(1.0, (passed - warmup) / length) if length > 0 else 0.0
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


def linear(*, warmup: Duration = "0ba", final: float = 0.0) -> ComposerScheduler:
    """A linear warm-up, then a straight line to the end of the run.

    Args:
        warmup: length of the warm-up.
        final: learning rate at the end, as a share of the peak.
    """
    return LinearWithWarmup(t_warmup=warmup, alpha_f=final)


def lr_monitor() -> Callback:
    """Logs the learning rate."""
    return LRMonitor()


def memory_monitor() -> Callback:
    """Logs the device memory that is allocated and reserved."""
    return MemoryMonitor()


def tensorboard(output: str, *, flush_every: int = 20) -> LoggerDestination:
    """TensorBoard files in <output>/tensorboard.

    Args:
        flush_every: batches between writes to disk.
    """
    return TensorboardLogger(log_dir=f"{output}/tensorboard", flush_interval=flush_every)


def wandb(
    run_name: str,
    output: str,
    *,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
    offline: bool = False,
) -> LoggerDestination:
    """Weights & Biases.

    Args:
        project: project that the run belongs to.
        entity: user or team; null: the logged-in user.
        tags: tags of the run.
        offline: write to disk only, to be synchronised later.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # W&B falls back to the current folder where this is missing
    settings: dict[str, Any] = {"dir": output, **({"mode": "offline"} if offline else {})}
    return WandBLogger(project=project, entity=entity, name=run_name, tags=tags, init_kwargs=settings)


def mlflow(run_name: str, output: str, *, experiment: str, tracking_uri: str | None = None) -> LoggerDestination:
    """MLflow.

    Args:
        experiment: experiment that the run belongs to.
        tracking_uri: address of a server or a database; null: MLFLOW_TRACKING_URI, else a database <output>/mlflow.db.
    """
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if tracking_uri is None:
        Path(output).mkdir(parents=True, exist_ok=True)
        tracking_uri = f"sqlite:///{Path(output, 'mlflow.db').resolve()}"
    return MLFlowLogger(
        experiment_name=experiment, run_name=run_name, tracking_uri=tracking_uri, log_system_metrics=False
    )
