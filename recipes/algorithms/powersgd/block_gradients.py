"""A block's gradients as the matrices that low-rank averaging works on, whole or divided over a machine's devices."""

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
    """A parameter of a block, and what it is made of.

    Attributes:
        name: of the parameter in its model.
        parameter: whole, or a DTensor of one mesh dimension.
        stacked: matrices that lie one above the other in it, each averaged by itself; 1 for most.
    """

    name: str
    parameter: nn.Parameter
    stacked: int

    @property
    def shapes(self) -> list[torch.Size]:
        """Of this rank's part of each matrix."""
        return [part.shape for part in self._parts(own(self.parameter))]

    def gradients(self) -> list[Tensor]:
        """This rank's part of each matrix' gradient, in the gradient's memory."""
        return self._parts(gradient_of(self.parameter))

    def whole(self, matrices: Iterator[Tensor]) -> Tensor:
        """What `LowRank` keeps of these matrices as one tensor of the parameter's shape, gathered over its shards.

        Every rank of the machine must call it.

        Args:
            matrices: (rows, columns) each, as many as are stacked are taken.
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
        """This rank's part of each matrix of a tensor of the parameter's shape, which every rank has.

        Raises:
            ValueError: another shape.
        """
        if whole.shape != self.parameter.shape:
            raise ValueError(
                f"powersgd: the checkpoint's errors of {self.name} have shape {tuple(whole.shape)}, the model "
                f"{tuple(self.parameter.shape)}"
            )
        if isinstance(self.parameter, DTensor):
            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            whole = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
        return self._parts(whole)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.unflatten(0, (self.stacked, -1)).unbind(0)) if self.stacked > 1 else [tensor]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient; zeros where the batch did not use the parameter, as other ranks may have."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return own(parameter.grad)


def blocks_of(task: nn.Module) -> list[list[Matrices]]:
    """The trained matrices of each block that has any, in the blocks' order.

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
    """By id: how each parameter of a task is to be divided over the devices of a machine.

    Low-rank factors of a piece have a side as long as each of its sides, so pieces should be as square as they can be.
    Stacked matrices are divided across, so that each device has a part of each of them. All but the matrices of blocks
    are divided by their first dimension, as FSDP does.
    """
    stacked = _stacked(task)
    matrices = [p for block in block_matrices(task, "powersgd") for p in block]
    return {id(p): Shard(cut_dimension(p.shape, stacked.get(id(p), 1), shards)) for p in matrices}


def cut_dimension(shape: Sequence[int], stacked: int, shards: int) -> int:
    """0 or 1: the dimension along which a matrix, or several stacked ones, is divided. See `placements`."""
    if shards == 1 or shape[1] % shards:
        return 0
    if stacked > 1:
        return 1
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return int(rows + columns / shards < rows / shards + columns)


def shard_shapes(shape: Sequence[int], stacked: int, shards: int) -> list[torch.Size]:
    """Shapes of the matrices that the first device of a machine has of a parameter."""
    cut = cut_dimension(shape, stacked, shards)
    local = [*shape]
    local[cut] = -(-local[cut] // shards)
    if stacked > 1 and (cut == 1 or shards == 1):
        return [torch.Size([local[0] // stacked, *local[1:]])] * stacked
    return [torch.Size(local)]


def first_device_shapes(task: nn.Module, shards: int) -> tuple[list[list[torch.Size]], int]:
    """Shapes of the first device's matrices, by block, and the number of the other parameters' values on it."""
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
    """By the weight's id, the matrices that a module says lie one above the other in it."""
    return {id(module.weight): module.stacked for module in task.modules() if hasattr(module, "stacked")}


def _whole_matrices(parameter: nn.Parameter, stacked: dict[int, int]) -> int:
    """Matrices stacked in this rank's part: divided by its first dimension, it has no whole rows of each."""
    divided = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    return 1 if divided and parameter.placements[0].dim == 0 else stacked.get(id(parameter), 1)
