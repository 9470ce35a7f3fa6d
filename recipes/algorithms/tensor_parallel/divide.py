"""A model's matrices divided over a group of devices by its plan (Shoeybi et al. 2019, section 3).

Parameters become DTensors under the same names, so that optimizers, clipping, averages and checkpoints see the whole
model: those that the plan divides, and all others as replicas. Modules compute with their local parts, by classes of
`recipes.algorithms.tensor_parallel.modules`. PyTorch's own styles (`parallelize_module`) compute on DTensors instead,
which takes the host longer.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from recipes.algorithms.modules.activation_checkpointing import recomputed_modules
from recipes.algorithms.tensor_parallel.modules import LOCAL, Divided, ReadsLocal, classes_of
from recipes.models.tensor_plan import TensorPlan


def divide(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, device: torch.device, sequence: bool = False) -> None:
    """Divide a model in place. All devices must have the same weights, or receive them later; nothing is sent.

    Args:
        model: whole. Its parameters are replaced, so the optimizer must be given the new ones.
        plan: of the model.
        mesh: one dimension, the devices that divide the model.
        device: of this rank, to which the parameters are moved, except those on the meta device.
        sequence: whether they divide the positions of the residual stream in training, too.

    Raises:
        ValueError: see `TensorPlan.check`; or a module with parameters that is none of `LOCAL` or `TensorPlan.reads`,
            or computes in another way than PyTorch's.
    """
    plan.check(mesh.size(), sequence=sequence)
    placements = {key: Shard(dimension) for key, dimension in plan.dimensions().items()}
    mixins = classes_of(plan, sequence)
    divided: dict[int, nn.Parameter] = {}
    for label, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        added = mixins.get(module, ())
        if own:
            added = (*added, ReadsLocal if module in plan.reads else _local_class(module, label))
        if added:
            module.__class__ = _joined(*added, type(module))
        if isinstance(module, Divided):
            module.tensor_group = mesh.get_group()
        for name, p in own.items():
            if id(p) not in divided:
                whole = p.detach() if p.is_meta else p.detach().to(device)
                part = _part(whole, mesh, placements.get(id(p), Replicate()))
                divided[id(p)] = nn.Parameter(part, requires_grad=p.requires_grad)
            module.register_parameter(name, divided[id(p)])
    if plan.vocabulary is not None:
        plan.vocabulary.first_token = mesh.get_local_rank() * -(-plan.vocabulary.out_features // mesh.size())
        plan.vocabulary.sequence = sequence
    if sequence:
        _open_entrances(model, plan)


def _open_entrances(model: nn.Module, plan: TensorPlan) -> None:
    """Tell each branch its column layers, and whether they keep all positions."""
    again = {inner for module in recomputed_modules(model) for inner in module.modules()}
    for branch in plan.branches:
        branch.module.columns = tuple(branch.columns)
        branch.module.keeps = branch.rows in again  # what is computed again is gathered for that


def _local_class(module: nn.Module, label: str) -> type:
    """The class with which a module computes on local parts."""
    for base, computes in LOCAL.items():
        if isinstance(module, base) and type(module).forward is base.forward:
            return computes
    raise ValueError(
        f"training.tensor_parallel: {label} is a {type(module).__name__}, which computes in a way of its own; remove "
        "the algorithm that changes it"
    )


def _part(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor that holds no more memory than its part."""
    found = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    if isinstance(placement, Replicate):
        return found
    local = found.to_local().clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


@cache
def _joined(*classes: type) -> type:
    return type("".join(cls.__name__ for cls in classes), classes, {})
