"""Parameters, gradients and optimizer state sharded over devices by PyTorch's FSDP2.

As in published ViT and Stable Diffusion recipes, each block is a unit, which is gathered at once, and what lies outside
of the blocks is another one. Gathered matrices of blocks have 16 bits; norms and what lies outside of the blocks keep
32, as under autocast. Gradient reductions and optimizer state have 32 bits.

A unit has one number format, and costs the host collectives and hooks in each pass. So the norms of all blocks belong
to the unit of the whole task, which is gathered before the first block runs: they need no collectives of their own, and
no hooks inside of blocks, which would divide the graph of a compiled block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm

from recipes.algorithms.sharding.shards import own
from recipes.models.shared_parameters import shared_across

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _BatchNorm)


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers at once, before the first of its modules runs.

    Attributes:
        modules: one, or several norms.
        dtype: of the gathered parameters; None: their own.
        without: modules inside of these whose own parameters, not those of their children, belong to another unit.
    """

    modules: list[nn.Module]
    dtype: torch.dtype | None
    without: list[nn.Module] = field(default_factory=list)


def units_of(
    task: nn.Module,
    *,
    by_block: bool = True,
    parameters: torch.dtype | None = None,
    recomputed: Collection[nn.Module] = (),
) -> list[Unit]:
    """The units that `shard` makes, in its order. Arguments as of `shard`; the task may be on any device."""
    if not by_block:
        norms = [] if parameters is None else _groups_of_norms(task, (*recomputed, *task.blocks()))
        return [*norms, Unit([task], parameters)]
    blocks = [Unit([block], parameters, [] if parameters is None else in_32_bits(block)) for block in task.blocks()]
    kept = {module for unit in blocks for module in unit.without}
    of_blocks = [module for unit in blocks for module in unit.modules[0].modules() if module not in kept]
    return [Unit([task], None, of_blocks), *blocks]


def in_32_bits(whole: nn.Module) -> list[nn.Module]:
    """The modules in a block or a task whose own parameters are gathered in 32 bits in any case: norms, and what has
    the attribute `full_precision`."""
    return list(dict.fromkeys(part for module in _precise(whole) for part in module.modules()))


def shard(
    task: nn.Module,
    mesh: DeviceMesh,
    *,
    by_block: bool = True,
    reshard_after_forward: bool = False,
    parameters: torch.dtype | None = None,
    recomputed: Collection[nn.Module] = (),
    dimensions: Mapping[int, Shard] | None = None,
) -> int:
    """Shard a task in place; returns the number of units, each of which is gathered on its own.

    Parameters become DTensors under the same names, so the optimizer must be given the new ones. Those that are
    DTensors already, divided over a tensor parallel group, must lie on another dimension of the mesh's root.

    Args:
        task: offers `blocks()`, called through their forward; and `entry_points`, names of the methods beside forward
            and `evaluate` that callers use.
        mesh: one dimension, to shard over; or two, to replicate over and to shard over.
        by_block: True: each block is a unit, and the rest of the task another one; False: the task is one unit.
        reshard_after_forward: True: free a block's gathered parameters between the forward and the backward pass
            (FULL_SHARD); False: only after the backward pass (SHARD_GRAD_OP), as those of the task's unit always are.
        parameters: dtype of the gathered parameters of blocks, or of the whole task if it is one unit, except those of
            norms and of modules with an attribute `full_precision`, which keep their own; None: their own.
        recomputed: modules whose forward runs a second time in the backward pass, each at a time of its own.
        dimensions: by the id of a parameter, the dimension that it is sharded along, if not the first. The size of the
            dimension must then be a multiple of the number of shards.

    Raises:
        ValueError: the task is sharded already; see also `check_shardable`.
    """
    if is_sharded(task):
        raise ValueError("fsdp: the model is sharded already")
    check_shardable(task, by_block=by_block)
    units = units_of(task, by_block=by_block, parameters=parameters, recomputed=recomputed)
    for parameter in task.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 shards no other memory format
    if mesh.device_type == "cpu":
        divide_by_ranks_on_cpu()
    shards = mesh.size(mesh.ndim - 1)
    options = {
        "mesh": mesh,
        "shard_placement_fn": lambda p: (dimensions or {}).get(id(p)) or _evenly(p, shards),
    }
    for unit in units:
        # Inputs and losses keep their 32 bits: autocast decides which operations take fewer.
        sums = None if unit.dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=unit.dtype, reduce_dtype=sums, cast_forward_inputs=False)
        fully_shard(
            # A list, even of one module, has the hooks of groups.
            unit.modules if len(unit.modules) > 1 else unit.modules[0],
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward and task not in unit.modules,
            # Parameters that a unit before this one has are new objects since.
            ignored_params={p for module in unit.without for p in module.parameters(recurse=False)},
            **options,
        )
    for name in {"evaluate", *task.entry_points}:
        register_fsdp_forward_method(task, name)
    return len(units)


def check_shardable(task: nn.Module, *, by_block: bool) -> None:
    """
    Args:
        task: on any device.
        by_block: whether each of its blocks is to be a unit.

    Raises:
        ValueError: `by_block` is True, and the task names no blocks, or one that is sharded already by then, or a block
            shares a parameter with another part of the task; or a parameter has no dimensions, or a trained one no
            elements.
    """
    if by_block and not task.blocks():
        raise ValueError("fsdp: the model names no blocks to shard one by one; set training.fsdp.wrap to model")
    for number, block in enumerate(task.blocks() if by_block else ()):
        inside = set(block.modules())
        if any(other in inside for other in task.blocks()[number + 1 :]):
            raise ValueError(
                f"fsdp: the model names a block {type(block).__name__} twice, or one that lies inside of it after it; "
                "name each once, and inner ones first, or set training.fsdp.wrap to model"
            )
    for parameter, names in shared_across(task, task.blocks()) if by_block else ():
        owners = {task.get_submodule(name.rpartition(".")[0]) for name in names}
        copied = not parameter.requires_grad and len(owners) == len(names)  # several, but they stay equal
        if len(names) > 1 and not copied:  # one alone is of a block within a block
            raise ValueError(
                f"fsdp: {' and '.join(names)} are one parameter, which would become several where blocks are sharded "
                "one by one; set training.fsdp.wrap to model"
            )
    for name, parameter in task.named_parameters():
        if parameter.ndim == 0:
            raise ValueError(
                f"fsdp: the model's {name} is a scalar, which PyTorch does not shard; make it a tensor of shape (1,), "
                "or set training.fsdp to null"
            )
        if not parameter.numel() and parameter.requires_grad:
            raise ValueError(
                f"fsdp: the model's {name} has no elements, and PyTorch cannot divide its gradient; remove it, or "
                "freeze it by requires_grad_(False)"
            )


def check_formats(task: nn.Module, units: Iterable[Unit]) -> None:
    """
    Args:
        task: on any device.
        units: of it, in the order in which they are made.

    Raises:
        ValueError: the parameters of a unit, which PyTorch gathers into one tensor, have several number formats.
    """
    names = {id(p): name for name, p in task.named_parameters()}
    taken: set[int] = set()
    for unit in units:
        left_out = taken | {id(p) for module in unit.without for p in module.parameters(recurse=False)}
        own = {id(p): p for module in unit.modules for p in module.parameters() if id(p) not in left_out}
        taken |= own.keys()
        # PyTorch 2.7 counts those that are not trained, too.
        counted = [p for p in own.values() if p.requires_grad or torch.__version__ < (2, 8)]
        found = {p.dtype: names[id(p)] for p in reversed(counted)}  # the first one of each
        if len(found) > 1:
            listed = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
            raise ValueError(
                f"fsdp: PyTorch gathers the parameters of {type(unit.modules[0]).__name__} together, which must have "
                f"one dtype: {listed}; give them one, name what has another in the model's `blocks()`, or set "
                "training.fsdp to null"
            )


def _precise(whole: nn.Module) -> list[nn.Module]:
    return [m for m in whole.modules() if isinstance(m, NORMS) or getattr(m, "full_precision", False)]


def _groups_of_norms(task: nn.Module, together: Iterable[nn.Module]) -> list[Unit]:
    """The units of what keeps 32 bits in a task that is one unit of fewer bits.

    FSDP2 reduces the gradients of a group after the backward pass of the module that ran first in the forward pass.
    This is the last backward pass of the group, whatever lies between its modules: of all operations that are ready,
    autograd runs the one that ran last in the forward pass.

    Args:
        task: the task.
        together: modules of which each makes one unit of what it holds, in order of precedence. They run whole: FSDP2
            waits for the last module of a group. What none of them holds becomes units one by one.
    """
    left = {id(m): m for m in _precise(task) if any(True for _ in m.parameters())}
    groups = [[left.pop(id(m)) for m in holder.modules() if id(m) in left] for holder in together]
    groups = [group for group in groups if group] + [[module] for module in left.values()]
    return [Unit(group, None) for group in groups]


def _evenly(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Columns, if a tensor parallel group divides the rows and its parts do not divide by the shards; None otherwise.

    FSDP2 pads no rows that are divided twice.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim < 2:
        return None
    (by_group,) = parameter.placements
    uneven = by_group.is_shard(0) and parameter.shape[0] % (shards * parameter.device_mesh.size())
    return Shard(1) if uneven else None


def divide_by_ranks_on_cpu() -> None:
    """Make gradients of FSDP2 on CPUs means over ranks in torch 2.7 too.

    In that version gloo's reduce-scatter silently returns the sum if asked for the mean, which Adam mostly hides. This
    makes FSDP2 divide by itself and ask for the sum. Later versions are correct and stay unchanged.
    """
    if torch.__version__ >= (2, 8):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # private, so only where it is needed

    if hasattr(_fsdp_collectives, "_asked_by_precompose"):
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
    """Whether FSDP2 has sharded a model, or a part of it."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The whole state dict of a sharded model in the host memory of the first rank; an empty dict on other ranks.

    Every rank must call it. Tensors are gathered one after another. They have memory of their own, also where each rank
    of a model on a CPU holds a parameter as a whole, which is not gathered.
    """
    found = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    held = {p.untyped_storage().data_ptr() for p in _on_this_cpu(module)}
    return {name: t.clone() if t.untyped_storage().data_ptr() in held else t for name, t in found.items()}


def _on_this_cpu(module: nn.Module) -> Iterator[Tensor]:
    """This rank's parts of parameters and buffers, as far as they are in host memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        part = own(tensor).detach()
        if part.device.type == "cpu" and part.numel():
            yield part
