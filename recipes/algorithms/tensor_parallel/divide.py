"""A model's matrices divided over a group of devices by its plan (Shoeybi et al. 2019, section 3).

Parameters become DTensors under the same names, so that optimizers, clipping, averages and checkpoints see the whole
model: those that the plan divides, and all others as replicas. Modules compute with their local parts. PyTorch's own
styles (`parallelize_module`) compute on DTensors instead, which takes the host longer.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from recipes.algorithms.tensor_parallel.collectives import enter, leave
from recipes.algorithms.tensor_parallel.vocabulary import divided_token_losses, gathered_logits
from recipes.models.autocast import for_products
from recipes.models.tensor_plan import TensorPlan


def local(parameter: Tensor | None) -> Tensor | None:
    """This device's part of a parameter, whose gradient is that of the DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class LocalLinear(nn.Linear):
    """A linear layer that computes with this device's part of its parameters; so do the two classes below."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return nn.functional.linear(x, local(self.weight), local(self.bias))


class LocalNorm(nn.LayerNorm):
    """See `LocalLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return nn.functional.layer_norm(x, self.normalized_shape, local(self.weight), local(self.bias), self.eps)


class LocalEmbedding(nn.Embedding):
    """See `LocalLinear`."""

    def forward(self, indices: Tensor) -> Tensor:
        """(...) int64 -> (..., d)."""
        return nn.functional.embedding(indices, local(self.weight))


LOCAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LocalLinear,
    nn.LayerNorm: LocalNorm,
    nn.Embedding: LocalEmbedding,
}


class EntersDivided(nn.Module):
    """A module whose output enters a divided branch."""

    tensor_group: ProcessGroup

    def forward(self, *args: Tensor) -> Tensor:
        """As the module's own, with the sum of the devices' gradients, which is sent in the dtype of the products."""
        return enter(for_products(super().forward(*args)), self.tensor_group)


class SumsRows(nn.Linear):
    """A linear layer of which each device has some columns of the weight, and the parts of the input that they take."""

    tensor_group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """(..., this device's inputs) -> (..., all outputs)."""
        y = leave(nn.functional.linear(x, local(self.weight)), self.tensor_group)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)  # once, and not by each device


class DividedVocabulary(nn.Linear):
    """An unembedding of which each device has some tokens. See `TensorPlan.vocabulary`."""

    tensor_group: ProcessGroup
    first_token: int

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """See `divided_token_losses`: hidden (M, d), targets (M,) -> (M,)."""
        return divided_token_losses(hidden, local(self.weight), targets, self.first_token, self.tensor_group)

    def logits(self, hidden: Tensor, first: int) -> Tensor:
        """(..., d) -> (..., C - first), see `gathered_logits`."""
        assert not torch.is_grad_enabled(), "the gathered logits have no gradient"
        return gathered_logits(hidden, local(self.weight), self.out_features, self.tensor_group)[..., first:]


def divide(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, device: torch.device) -> None:
    """Divide a model in place. All devices must have the same weights; nothing is sent.

    Args:
        model: whole. Its parameters are replaced, so the optimizer must be given the new ones.
        plan: of the model.
        mesh: one dimension, the devices that divide the model.
        device: of this rank, to which the parameters are moved.

    Raises:
        ValueError: see `TensorPlan.check`; or a module with parameters that is none of `LOCAL`, or computes in another
            way than PyTorch's.
    """
    plan.check(mesh.size())
    group = mesh.get_group()
    placements = {key: Shard(dimension) for key, dimension in plan.dimensions().items()}
    mixins: dict[nn.Module, type] = {branch.entered: EntersDivided for branch in plan.branches}
    mixins |= {branch.rows: SumsRows for branch in plan.branches}
    if plan.vocabulary is not None:
        mixins[plan.vocabulary] = DividedVocabulary
        tokens = plan.vocabulary.out_features
        plan.vocabulary.first_token = mesh.get_local_rank() * -(-tokens // mesh.size())
    divided: dict[int, nn.Parameter] = {}
    for label, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        module.__class__ = _class_for(module, label, mixins.get(module))
        if module in mixins:
            module.tensor_group = group
        for name, p in own.items():
            if id(p) not in divided:
                part = _part(p.detach().to(device), mesh, placements.get(id(p), Replicate()))
                divided[id(p)] = nn.Parameter(part, requires_grad=p.requires_grad)
            module.register_parameter(name, divided[id(p)])


def _class_for(module: nn.Module, label: str, mixin: type | None) -> type:
    """The class with which a module computes on local parts."""
    for base, computes in LOCAL.items():
        if isinstance(module, base) and type(module).forward is base.forward:
            return _joined(*([] if mixin is None else [mixin]), computes, type(module))
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
