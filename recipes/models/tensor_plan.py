"""How the matrices of a model can be divided over devices (tensor parallelism, Shoeybi et al. 2019, section 3).

A plan names modules and sizes. It knows nothing of devices; `recipes.algorithms.tensor_parallel` divides by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn


@dataclass(frozen=True)
class DividedBranch:
    """A residual branch: one message where it is entered, in the backward pass, and one where it is left.

    Attributes:
        module: the branch. Its forward calls `norm`, then its method `enter`, whose result is the only input of all of
            `columns`, except for those that take the output of one of `TensorPlan.enters`. `enter` may reorder
            positions; its first argument is the norm's output, the others are what the branch is called with.
        norm: normalises the residual stream; None: that is done elsewhere, and sequence parallelism is refused.
        columns: linear layers whose outputs are divided: each device has some of the rows of their weights. A part of
            the outputs must be usable without the others, such as a number of whole heads.
        rows: the linear layer that takes the divided outputs and whose own is the sum over devices.
        of_text: whether the stream is that of the text beside the other one, see `TensorPlan.text_positions`.
        needed_again: whether a backward pass of the block around it needs the branch's output, so that activation
            checkpointing of the block computes it, and sends its message, a second time.
    """

    module: nn.Module
    norm: nn.LayerNorm | None
    columns: Sequence[nn.Linear]
    rows: nn.Linear
    of_text: bool = False
    needed_again: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What is divided. Parameters that the plan does not name are whole on each device.

    Attributes:
        branches: in the order of the model.
        vocabulary: the linear layer that predicts tokens, with methods `losses` and `logits` as
            `recipes.models.autoregressive.transformer.Unembedding` has; None: there is none.
        sizes: what the number of devices must divide, by name, such as {"heads": 62, "width": 3968}.
        positions: number of positions of a sample in the residual stream, S; 0: `lengths` tells it.
        predicted: number of those from which a token is predicted.
        width: width of the residual stream, d.
        begins: module without parameters whose output is the residual stream, (B, S, d); None: sequence parallelism is
            refused.
        ends: the norm after the last branch, whose output goes to `vocabulary` only; None: as for `begins`.
        embeds: whether `vocabulary` also embeds the input tokens, by a method `embed` as
            `recipes.models.language.transformer.TokenTable` has.
        draws: modules that draw random numbers within divided branches: other ones on each device.
        dropouts: modules that draw random numbers in the residual stream, outside of branches: the same on all devices,
            or other ones where sequence parallelism divides it.
        enters: modules without parameters whose outputs, (B, L, d), are taken by column layers of branches only: the
            sum of the devices' gradients is sent once for all of these layers.
        reads: modules that have parameters themselves, whole on each device, and use them as attributes.
        text_positions: number of positions of a sample in the text beside the residual stream, L; 0: there is none, or
            `lengths` tells it.
        lengths: from a batch to `positions` and `text_positions`, where they depend on the data.
    """

    branches: Sequence[DividedBranch]
    vocabulary: nn.Linear | None
    sizes: Mapping[str, int]
    positions: int
    predicted: int
    width: int
    begins: nn.Module | None
    ends: nn.LayerNorm | None
    embeds: bool = False
    draws: Sequence[nn.Module] = ()
    dropouts: Sequence[nn.Module] = ()
    enters: Sequence[nn.Module] = ()
    reads: Sequence[nn.Module] = ()
    text_positions: int = 0
    lengths: Callable[[Mapping[str, Tensor]], tuple[int, int]] | None = None

    def for_batch(self, batch: Mapping[str, Tensor]) -> TensorPlan:
        """The plan with the numbers of positions of a batch, if they depend on it."""
        if self.lengths is None:
            return self
        positions, text = self.lengths(batch)
        return replace(self, positions=positions, text_positions=text)

    def dimensions(self) -> dict[int, int]:
        """The dimension along which each divided parameter is divided, by the parameter's id."""
        found = {id(branch.rows.weight): 1 for branch in self.branches}
        found |= {id(p): 0 for branch in self.branches for layer in branch.columns for p in layer.parameters()}
        return found | ({} if self.vocabulary is None else {id(self.vocabulary.weight): 0})

    def check(self, devices: int, shards: int = 1, sequence: bool = False) -> None:
        """
        Args:
            devices: number of devices that divide each matrix.
            shards: number of parts into which FSDP2 divides each part, which must be equal.
            sequence: whether they divide the positions of the residual stream, too.

        Raises:
            ValueError: a size that the number of devices does not divide, or a residual stream that cannot be divided.
        """
        if sequence and self.begins is None:
            raise ValueError(
                "training.sequence_parallel: the model does not say how its residual stream can be divided; give "
                "training.sequence_parallel=false"
            )
        if sequence and self.positions % devices:
            raise ValueError(
                f"training.sequence_parallel: {devices} devices do not divide {self.positions} positions; give "
                "training.sequence_parallel=false, or another number of devices or positions"
            )
        for name, size in self.sizes.items():
            if size % devices:
                largest = math.gcd(*self.sizes.values())
                fits = [number for number in range(2, min(largest, 64) + 1) if largest % number == 0]
                instead = f"give {', '.join(map(str, fits))}, or 1" if fits else "give 1"
                raise ValueError(
                    f"training.tensor_parallel: {devices} does not divide the model's {name}, {size}; {instead}"
                )
        for size in {layer.out_features for branch in self.branches for layer in branch.columns}:
            if size % (devices * shards):
                raise ValueError(
                    f"training.tensor_parallel: {devices} devices times {shards} shards do not divide a matrix of "
                    f"{size} rows; set training.fsdp.replicas so that there are fewer shards"
                )
