"""Parameters, gradients and optimizer state divided over devices, by PyTorch's FSDP2.

Source: "Fully sharded data parallel" as the ViT and Stable Diffusion recipes use it: the outer model wrapped, each
block wrapped inside of it, 16-bit parameters with 32-bit norms, 32-bit gradients' sums and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _BatchNorm)


def shard(
    task: nn.Module,
    mesh: DeviceMesh,
    *,
    by_block: bool = True,
    reshard_after_forward: bool = False,
    parameters: torch.dtype | None = None,
    of_blocks_only: bool = False,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
) -> int:
    """Shard a task in place; returns the number of units that are gathered one by one.

    Names of parameters stay; the parameters become DTensors, so an optimizer must be given the new ones.

    Args:
        task: offers `blocks()`, called through their forward; and `entry_points`, names of the methods beside forward
            and `evaluate` that callers use.
        mesh: one dimension to shard over; or two, to replicate over and to shard over.
        by_block: each block is a unit, and what is left of the task another; else the task is one unit.
        reshard_after_forward: free gathered parameters between forward and backward (FULL_SHARD); else only the
            backward pass frees them (SHARD_GRAD_OP).
        parameters: number format of gathered parameters, except those of norms and of modules that have
            `full_precision`, which stay in 32 bits; None: their own.
        of_blocks_only: what lies outside of blocks is gathered in its own format.
        placement: the dimension that a parameter is divided along, which must be a multiple of the shards unless it is
            the first; None: the first.

    Raises:
        ValueError: the task is sharded already, or names no blocks where they are asked for.
    """
    if is_sharded(task):
        raise ValueError("fsdp: the model is sharded already")
    blocks = list(task.blocks()) if by_block else []
    if by_block and not blocks:
        raise ValueError("fsdp: the model names no blocks to shard one by one; set training.fsdp.wrap to model")
    _make_contiguous(task)
    if mesh.device_type == "cpu":
        divide_by_ranks_on_cpu()
    options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "shard_placement_fn": placement}
    units = 0
    for unit in (*blocks, task):
        low = None if of_blocks_only and unit is task else parameters
        if low is not None:
            units += _shard_in_32_bits(unit, options)
        # Losses, and what enters the network, keep their 32 bits: autocast decides where fewer do.
        sums = None if low is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=sums, cast_forward_inputs=False)
        fully_shard(unit, mp_policy=policy, **options)
        units += 1
    for name in {"evaluate", *task.entry_points}:
        register_fsdp_forward_method(task, name)
    return units


def _shard_in_32_bits(unit: nn.Module, options: dict) -> int:
    """Norms of a unit, and what has `full_precision`, one by one in 32 bits; returns their number."""
    named = [m for m in unit.modules() if isinstance(m, NORMS) or getattr(m, "full_precision", False)]
    named = [m for m in named if not isinstance(m, FSDPModule) and any(True for _ in m.parameters())]
    for module in named:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
    return len(named)


def _make_contiguous(task: nn.Module) -> None:
    """FSDP2 takes rows in their plain order only."""
    for parameter in task.parameters():
        parameter.data = parameter.data.contiguous()


def divide_by_ranks_on_cpu() -> None:
    """Gradients of FSDP2 on a CPU become means over ranks in torch 2.7 too.

    There gloo's reduce-scatter returns the sum where the mean is asked for, in silence, and Adam hides most of it. Told
    to divide by itself, FSDP2 asks for the sum. Later versions are right and left alone.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8) or hasattr(
        _fsdp_collectives, "_asked_by_precompose"
    ):
        return
    factors = _fsdp_collectives._get_gradient_divide_factors

    def of_device(scatter: dist.ProcessGroup, reduce: dist.ProcessGroup | None, dtype: torch.dtype, device: str = ""):
        if device != "cpu":
            return factors(scatter, reduce, dtype, device)
        ranks = scatter.size() * (1 if reduce is None else reduce.size())
        return float(ranks), 1.0

    _fsdp_collectives._get_gradient_divide_factors = of_device
    _fsdp_collectives._asked_by_precompose = True


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 holds a part of a model."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a sharded model's state dict, in the first rank's host memory; empty on other ranks.

    Every rank must call it: tensors are gathered one after another.
    """
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
