"""The gradients of a block as matrices for low-rank averaging, whole or sharded over the devices of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recipes.algorithms.averaging.average import own
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.powersgd.low_rank import from_matrix


@dataclass(frozen=True)
class Matrices:
    """A parameter of a block, as one or several matrices.

    Attributes:
        name: name of the parameter in its model.
        parameter: an ordinary tensor, or a DTensor of one mesh dimension.
        stacked: number of matrices that are concatenated along its first dimension, and averaged separately; usually 1.
    """

    name: str
    parameter: nn.Parameter
    stacked: int

    @property
    def shapes(self) -> list[torch.Size]:
        """The shape of this rank's shard of each matrix."""
        return [part.shape for part in self._parts(own(self.parameter))]

    def gradients(self) -> list[Tensor]:
        """This rank's shard of the gradient of each matrix, as views of the gradient."""
        return self._parts(gradient_of(self.parameter))

    def whole(self, matrices: Iterator[Tensor]) -> Tensor:
        """Errors of these matrices as one tensor of the parameter's shape, gathered over its shards.

        Every rank of the machine must call it.

        Args:
            matrices: (rows, columns) each, as `LowRank` keeps them; `stacked` of them are taken.
        """
        parts = [from_matrix(next(matrices), shape) for shape in self.shapes]
        local = torch.stack(parts).flatten(0, 1) if len(parts) > 1 else parts[0]
        if not isinstance(self.parameter, DTensor):
            return local
        p = self.parameter
        return DTensor.from_local(
            local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        ).full_tensor()

    def parts_of(self, whole: Tensor) -> list[Tensor]:
        """The inverse of `whole`: this rank's shard of each matrix of a tensor of the parameter's shape.

        Raises:
            ValueError: the tensor has another shape.
        """
        if whole.shape != self.parameter.shape:
            raise ValueError(
                f"powersgd: the checkpoint's errors of {self.name} have shape {tuple(whole.shape)}, but the "
                f"parameter has {tuple(self.parameter.shape)}"
            )
        if isinstance(self.parameter, DTensor):
            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            whole = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
        return self._parts(whole)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.unflatten(0, (self.stacked, -1)).unbind(0)) if self.stacked > 1 else [tensor]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a gradient; zeros if the batch did not use the parameter, which other ranks may have."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return own(parameter.grad)


def blocks_of(task: nn.Module) -> list[list[Matrices]]:
    """The trained matrices of each block that has any, in the order of the blocks.

    Raises:
        ValueError: the task has no blocks, or no matrices in them.
    """
    names = {id(p): name for name, p in task.named_parameters()}
    stacked = _stacked(task)
    return [
        [Matrices(names[id(p)], p, _whole_matrices(p, stacked)) for p in matrices]
        for matrices in block_matrices(task, "powersgd")
        if matrices
    ]


def placements(task: nn.Module, shards: int) -> dict[int, Shard]:
    """The sharding of the matrices of blocks over the devices of a machine, by the parameter's id.

    The two low-rank factors of a shard are as long as its two sides, so shards should be as square as possible. Stacked
    matrices are sharded along the second dimension, so that each device has a part of each of them. Parameters that are
    not in the result are sharded along the first dimension, as by FSDP.
    """
    stacked = _stacked(task)
    matrices = [p for block in block_matrices(task, "powersgd") for p in block]
    return {id(p): Shard(cut_dimension(p.shape, stacked.get(id(p), 1), shards)) for p in matrices}


def cut_dimension(shape: Sequence[int], stacked: int, shards: int) -> int:
    """The dimension along which a matrix, or several stacked ones, is sharded: 0 or 1. See `placements`."""
    if shards == 1 or shape[1] % shards:
        return 0
    if stacked > 1:
        return 1
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return int(rows + columns / shards < rows / shards + columns)


def shard_shapes(shape: Sequence[int], stacked: int, shards: int) -> list[torch.Size]:
    """Shapes of the first device's shards of the matrices of a parameter."""
    cut = cut_dimension(shape, stacked, shards)
    local = [*shape]
    local[cut] = -(-local[cut] // shards)
    if stacked > 1 and (cut == 1 or shards == 1):
        return [torch.Size([local[0] // stacked, *local[1:]])] * stacked
    return [torch.Size(local)]


def first_device_shapes(task: nn.Module, shards: int) -> tuple[list[list[torch.Size]], int]:
    """Shapes of the first device's shards of matrices, per block, and the number of values of its other parameters."""
    stacked = _stacked(task)
    blocks = [matrices for matrices in block_matrices(task, "powersgd") if matrices]
    inside = {id(p) for matrices in blocks for p in matrices}
    others = sum(
        -(-p.shape[0] // shards) * torch.Size(p.shape[1:]).numel()
        for p in task.parameters()
        if p.requires_grad and id(p) not in inside
    )
    shapes = [
        [shape for p in matrices for shape in shard_shapes(p.shape, stacked.get(id(p), 1), shards)]
        for matrices in blocks
    ]
    return shapes, others


def _stacked(task: nn.Module) -> dict[int, int]:
    """Number of stacked matrices by the id of the weight, for modules that say so in their attribute `stacked`."""
    return {id(module.weight): module.stacked for module in task.modules() if hasattr(module, "stacked")}


def _whole_matrices(parameter: nn.Parameter, stacked: dict[int, int]) -> int:
    """Number of matrices stacked in this rank's shard: 1 if sharded along dimension 0, which cuts through matrices."""
    divided = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    return 1 if divided and parameter.placements[0].dim == 0 else stacked.get(id(parameter), 1)
