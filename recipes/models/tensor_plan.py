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
        entered: the module whose output is the only input of all of `columns`, such as the norm.
        columns: linear layers whose outputs are divided: each device has some of the rows of their weights. A part of
            the outputs must be usable without the others, such as a number of whole heads.
        rows: the linear layer that takes the divided outputs and whose own is the sum over devices.
    """

    entered: nn.Module
    columns: Sequence[nn.Linear]
    rows: nn.Linear


@dataclass(frozen=True)
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
    """

    branches: Sequence[DividedBranch]
    vocabulary: nn.Linear | None
    sizes: Mapping[str, int]
    positions: int
    predicted: int
    width: int

    def dimensions(self) -> dict[int, int]:
        """The dimension along which each divided parameter is divided, by the parameter's id."""
        found = {id(branch.rows.weight): 1 for branch in self.branches}
        found |= {id(p): 0 for branch in self.branches for layer in branch.columns for p in layer.parameters()}
        return found | ({} if self.vocabulary is None else {id(self.vocabulary.weight): 0})

    def check(self, devices: int, shards: int = 1) -> None:
        """
        Args:
            devices: number of devices that divide each matrix.
            shards: number of parts into which FSDP2 divides each part, which must be equal.

        Raises:
            ValueError: a size that the number of devices does not divide.
        """
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
