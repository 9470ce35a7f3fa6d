"""The classes that modules of a divided model get: they compute with this device's part of the parameters.

Each is added as a first base class of a module's own. With sequence parallelism, the residual stream is divided over
positions where gradients are enabled. Without gradients nothing is kept, and sampling has sequences of any length: the
stream is then whole, as without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from recipes.algorithms.tensor_parallel.collectives import enter, leave
from recipes.algorithms.tensor_parallel.generators import own_generators
from recipes.algorithms.tensor_parallel.sequence import (
    column_products,
    divide_positions,
    gather_positions,
    scatter_positions,
    shared,
    whole_sequence,
)
from recipes.algorithms.tensor_parallel.vocabulary import divided_rows, divided_token_losses, gathered_logits
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


class ReadsLocal(nn.Module):
    """A module that uses parameters of its own as attributes. In its forward, they are this device's parts of them.

    Attributes:
        computes: whether its forward runs. Elsewhere, FSDP2 expects the parameters themselves.
    """

    computes: bool = False

    def forward(self, *inputs: Tensor) -> Tensor:
        """See the `forward` of the module's own class."""
        self.computes = True
        try:
            return super().forward(*inputs)
        finally:
            self.computes = False

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return local(found) if self.computes and isinstance(found, nn.Parameter) else found


LOCAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LocalLinear,
    nn.LayerNorm: LocalNorm,
    nn.Embedding: LocalEmbedding,
}


class Divided(nn.Module):
    """The base class of those that follow.

    Attributes:
        tensor_group: the devices that divide the model.
    """

    tensor_group: ProcessGroup


class Enters(Divided):
    """A branch: the norm's output enters the divided region."""

    def enter(self, x: Tensor, *context: Any) -> Tensor:
        """The branch's own `enter`, with the sum of the devices' gradients, sent in the dtype of the products."""
        return super().enter(enter(for_products(x), self.tensor_group), *context)


class EntersOnce(Divided):
    """A module whose output enters the divided region of several branches, see `TensorPlan.enters`."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, d) -> (B, L, d). Gradients of all branches are added in the dtype of x, and then sent."""
        return enter(super().forward(x), self.tensor_group)


class SumsRows(Divided, nn.Linear):
    """A linear layer of which each device has some columns of the weight, and the parts of the input that they take."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., this device's inputs) -> (..., all outputs)."""
        y = leave(nn.functional.linear(x, local(self.weight)), self.tensor_group)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)  # once, and not by each device


class DrawsOwn(Divided):
    """A module that draws other random numbers on each device."""

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """See the `forward` of the module's own class."""
        if not self.training:
            return super().forward(x, *context)
        with own_generators(self.tensor_group, x.device):
            return super().forward(x, *context)


class DividedVocabulary(Divided, nn.Linear):
    """A table of which each device has some tokens. See `TensorPlan.vocabulary` and `TensorPlan.embeds`."""

    first_token: int
    sequence: bool

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 -> (B, S, d): each device's own tokens, summed over the devices."""
        return leave(divided_rows(tokens, local(self.weight), self.first_token), self.tensor_group)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """See `divided_token_losses`: hidden (M, d), targets (M,) -> (M,)."""
        # With sequence parallelism, the module that gathers the positions sums the gradients.
        hidden = hidden if self.sequence else enter(for_products(hidden), self.tensor_group)
        return divided_token_losses(hidden, local(self.weight), targets, self.first_token, self.tensor_group)

    def logits(self, hidden: Tensor, first: int) -> Tensor:
        """(..., d) -> (..., C - first), see `gathered_logits`."""
        assert not torch.is_grad_enabled(), "the gathered logits have no gradient"
        return gathered_logits(hidden, local(self.weight), self.out_features, self.tensor_group)[..., first:]


# --- with sequence parallelism -------------------------------------------------------------------------------------


class EntersSequence(Divided):
    """A branch: the positions of all devices enter the divided region.

    Attributes:
        columns: the layers that take them.
        keeps: whether the layers keep all positions for the backward pass, which is right where a branch is computed
            again for it. Otherwise they keep those of this device.
    """

    columns: Sequence[TakesGathered]
    keeps: bool

    def enter(self, x: Tensor, *context: Any) -> Tensor:
        """The branch's own `enter` of all positions: (B, S/N, d) -> (B, S, d)."""
        if not torch.is_grad_enabled():
            return super().enter(x, *context)
        own, order = for_products(x), super().enter
        found = order(gather_positions(own, self.tensor_group), *context)
        if not self.keeps:

            def whole(own: Tensor) -> Tensor:
                return order(whole_sequence(own, self.tensor_group), *context)

            # All layers at once, so that the backward pass gathers once.
            products = column_products(found, own, whole, [layer.factors() for layer in self.columns])
            for layer, product in zip(self.columns, products, strict=True):
                layer.product = product
        return found


class TakesGathered(Divided, nn.Linear):
    """A column layer, whose product its branch may have computed where it was entered.

    Attributes:
        product: of this pass, until it is taken; None: the layer computes it.
    """

    product: Tensor | None = None

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """This device's weight and bias, in the dtype of products."""
        bias = None if self.bias is None else for_products(local(self.bias))
        return for_products(local(self.weight)), bias

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, this device's outputs)."""
        if self.product is None or not torch.is_grad_enabled():  # a pass that failed halfway may have left one
            return super().forward(x)
        product, self.product = self.product, None
        return product


class ScattersRows(SumsRows):
    """As `SumsRows`; each device gets its own positions of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, this device's inputs) -> (B, S/N, all outputs)."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        y = scatter_positions(nn.functional.linear(x, local(self.weight)), self.tensor_group)
        return y if self.bias is None else y + shared(self.tensor_group, local(self.bias))[0].to(y.dtype)


class SequenceNorm(Divided, nn.LayerNorm):
    """A norm of the residual stream, of which each device has some positions."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S/N, d) -> (B, S/N, d)."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        weight, bias = shared(self.tensor_group, local(self.weight), local(self.bias))
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class BeginsSequence(Divided):
    """The module whose output is the residual stream: from here on each device has its own positions."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S/N, d)."""
        return super().forward(divide_positions(x, self.tensor_group) if torch.is_grad_enabled() else x)


class EndsSequence(Divided):
    """The last norm: the positions of all devices enter the divided vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S/N, d) -> (B, S, d)."""
        x = super().forward(x)
        return gather_positions(for_products(x), self.tensor_group) if torch.is_grad_enabled() else x


class DrawsOwnPositions(DrawsOwn):
    """Dropout of the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S/N, d) -> (B, S/N, d)."""
        return super().forward(x) if torch.is_grad_enabled() else super(DrawsOwn, self).forward(x)


def classes_of(plan: TensorPlan, sequence: bool) -> dict[nn.Module, tuple[type[Divided], ...]]:
    """The classes that each module of a plan gets, the first one to be called first.

    Args:
        plan: of the model.
        sequence: whether positions of the residual stream are divided.
    """
    found: dict[nn.Module, tuple[type[Divided], ...]] = {module: (DrawsOwn,) for module in plan.draws}
    found |= {module: (EntersOnce,) for module in plan.enters}
    for branch in plan.branches:
        found[branch.module] = (EntersSequence if sequence else Enters,)
        found[branch.rows] = (ScattersRows if sequence else SumsRows,)
    if plan.vocabulary is not None:
        found[plan.vocabulary] = (DividedVocabulary,)
    if not sequence:
        return found
    for branch in plan.branches:
        found[branch.norm] = (SequenceNorm,)
        found |= {layer: (TakesGathered,) for layer in branch.columns}
    found |= {module: (DrawsOwnPositions,) for module in plan.dropouts}
    found[plan.begins] = (BeginsSequence, *found.get(plan.begins, ()))
    found[plan.ends] = (EndsSequence, SequenceNorm)
    return found
