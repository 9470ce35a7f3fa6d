"""The gradients of a block as matrices for low-rank averaging, whole or sharded over the devices of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.powersgd.low_rank import from_matrix
from recipes.algorithms.sharding.shards import as_shard, own, shard_of


@dataclass(frozen=True)
class Matrix:
    """A parameter of a block.

    Attributes:
        name: name of the parameter in its model.
        parameter: an ordinary tensor, or a DTensor.
    """

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's shard."""
        return own(self.parameter).shape

    def gradient(self) -> Tensor:
        """This rank's shard of the gradient."""
        return gradient_of(self.parameter)

    def in_shape(self, matrix: Tensor) -> Tensor:
        """Errors of this rank's shard in its own shape; as a DTensor where the parameter is one.

        Args:
            matrix: (rows, columns), as `LowRank` keeps them.
        """
        return as_shard(self.parameter, from_matrix(matrix, self.shape).contiguous())

    def part_of(self, saved: Tensor) -> Tensor:
        """The inverse of `in_shape`: this rank's shard of a tensor of the parameter's shape.

        Args:
            saved: as `shard_of` takes it.

        Raises:
            ValueError: the tensor has another shape.
        """
        if saved.shape != self.parameter.shape:
            raise ValueError(
                f"powersgd: the checkpoint's errors of {self.name} have shape {tuple(saved.shape)}, but the "
                f"parameter has {tuple(self.parameter.shape)}"
            )
        return shard_of(self.parameter, saved)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a gradient; zeros if the batch did not use the parameter, which other ranks may have."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return own(parameter.grad)


def copies_of(parameter: nn.Parameter) -> int:
    """Number of devices of a machine that hold the same shard of a parameter: those of a tensor parallel group, if it
    does not divide the parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(i) for i, placement in enumerate(parameter.placements) if placement.is_replicate())


def blocks_of(task: nn.Module) -> list[list[Matrix]]:
    """The trained matrices of each block that has any, in the order of the blocks.

    Raises:
        ValueError: the task has no blocks, or no matrices in them.
    """
    names = {id(p): name for name, p in task.named_parameters()}
    return [[Matrix(names[id(p)], p) for p in found] for found in block_matrices(task, "powersgd") if found]


@torch.no_grad()
def placements(task: nn.Module, shards: int) -> dict[int, Shard]:
    """The sharding of the matrices of blocks over the devices of a machine, by the parameter's id.

    The two low-rank factors of a shard are as long as its two sides, so shards should be as square as possible.
    Parameters that are not in the result are sharded along the first dimension, as by FSDP. Of matrices that a tensor
    parallel group divides, each device's part is sharded.
    """
    matrices = [p for block in block_matrices(task, "powersgd") for p in block]
    return {id(p): Shard(cut_dimension(own(p).shape, shards)) for p in matrices}


def cut_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension along which a matrix is sharded: 0 or 1. See `placements`."""
    if shards == 1 or shape[1] % shards:
        return 0
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return int(rows + columns / shards < rows / shards + columns)


def shard_shape(shape: Sequence[int], shards: int) -> torch.Size:
    """Shape of the first device's shard of a parameter."""
    local = [*shape]
    cut = cut_dimension(shape, shards)
    local[cut] = -(-local[cut] // shards)
    return torch.Size(local)


def first_device_shapes(
    task: nn.Module, shards: int, tensor: int = 1, dimensions: Mapping[int, int] | None = None
) -> tuple[list[list[torch.Size]], int]:
    """Shapes of the first device's shards of matrices, per block, and the number of values of its other parameters.

    Args:
        task: the model, whole.
        shards: devices that each part is sharded over.
        tensor: devices that divide the parameters in `dimensions` first.
        dimensions: see `TensorPlan.dimensions`.
    """

    def part(p: nn.Parameter) -> list[int]:
        shape = [*p.shape]
        if tensor > 1 and id(p) in (dimensions or {}):
            shape[dimensions[id(p)]] = -(-shape[dimensions[id(p)]] // tensor)
        return shape

    blocks = [matrices for matrices in block_matrices(task, "powersgd") if matrices]
    inside = {id(p) for matrices in blocks for p in matrices}
    rest = [part(p) for p in task.parameters() if p.requires_grad and id(p) not in inside]
    others = sum(-(-shape[0] // shards) * torch.Size(shape[1:]).numel() for shape in rest)
    return [[shard_shape(part(p), shards) for p in matrices] for matrices in blocks], others
