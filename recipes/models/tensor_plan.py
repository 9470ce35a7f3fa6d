"""How the matrices of a model can be divided over devices (tensor parallelism, Shoeybi et al. 2019, section 3).

A plan names modules and sizes. It knows nothing of devices; `recipes.algorithms.tensor_parallel` divides by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class DividedBranch:
    """A residual branch: one message where it is entered, in the backward pass, and one where it is left.

    Attributes:
        module: the branch. Its forward calls `norm`, then its method `enter`, whose result is the only input of all of
            `columns`. `enter` may reorder positions; its first argument is the norm's output, the others are what the
            branch is called with.
        norm: normalises the residual stream.
        columns: linear layers whose outputs are divided: each device has some of the rows of their weights. A part of
            the outputs must be usable without the others, such as a number of whole heads.
        rows: the linear layer that takes the divided outputs and whose own is the sum over devices.
    """

    module: nn.Module
    norm: nn.LayerNorm
    columns: Sequence[nn.Linear]
    rows: nn.Linear


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What is divided. Parameters that the plan does not name are whole on each device.

    Attributes:
        branches: in the order of the model.
        vocabulary: the linear layer that predicts tokens, with methods `losses` and `logits` as
            `recipes.models.autoregressive.transformer.Unembedding` has; None: there is none.
        sizes: what the number of devices must divide, by name, such as {"heads": 62, "width": 3968}.
        positions: number of positions of a sample in the residual stream, S.
        predicted: number of those from which a token is predicted.
        width: width of the residual stream, d.
        begins: module without parameters whose output is the residual stream, (B, S, d).
        ends: the norm after the last branch, whose output goes to `vocabulary` only.
        embeds: whether `vocabulary` also embeds the input tokens, by a method `embed` as
            `recipes.models.language.transformer.TokenTable` has.
        draws: modules that draw random numbers within divided branches: other ones on each device.
        dropouts: modules that draw random numbers in the residual stream, outside of branches: the same on all devices,
            or other ones where sequence parallelism divides it.
    """

    branches: Sequence[DividedBranch]
    vocabulary: nn.Linear | None
    sizes: Mapping[str, int]
    positions: int
    predicted: int
    width: int
    begins: nn.Module
    ends: nn.LayerNorm
    embeds: bool = False
    draws: Sequence[nn.Module] = ()
    dropouts: Sequence[nn.Module] = ()

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
            ValueError: a size that the number of devices does not divide.
        """
        if sequence and self.positions % devices:
            raise ValueError(
                f"training.sequence_parallel: {devices} devices do not divide {self.positions} positions; give "
                "training.sequence_parallel=false, or another number of devices or positions"
            )
        for name, size in self.sizes.items():
            if size % devices:
                largest = math.gcd(*self.sizes.values())
                fits = [number for number in range(2, min(largest, 64) + 1) if largest % number == 0]
                instead = f"give {_either(fits)}, or 1" if fits else "give 1"
                raise ValueError(
                    f"training.tensor_parallel: {devices} does not divide the model's {name}, {size}; {instead}"
                )
        for size in {layer.out_features for branch in self.branches for layer in branch.columns}:
            if size % (devices * shards):
                raise ValueError(
                    f"training.tensor_parallel: {devices} devices times {shards} shards do not divide a matrix of "
                    f"{size} rows; set training.fsdp.replicas so that there are fewer shards"
                )


def _either(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
