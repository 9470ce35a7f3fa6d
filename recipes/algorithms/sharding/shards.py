"""Single shards of tensors: this rank's part of a parameter, and tensors that are sharded as a parameter is."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def own(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, or the parameter itself if it is not sharded; no view is made, which would take
    the host microseconds. Must be called under `torch.no_grad`."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def as_shard(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor as this rank's shard of one that is sharded as a parameter is; unchanged if the parameter is not.

    The shard may lie in host memory, as those of FSDP's CPU offload do. `DTensor.from_local` would copy it to the
    device. Checkpoints can write and read it; all else needs it on the device (`whole`).

    Args:
        parameter: of a model.
        local: with the shape of this rank's shard, of any dtype.
    """
    if not isinstance(parameter, DTensor):
        return local
    like = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, like), requires_grad=False)


def shard_of(parameter: Tensor, saved: Tensor) -> Tensor:
    """This rank's shard of a tensor of the parameter's shape.

    Args:
        parameter: of a model.
        saved: a DTensor that is sharded as the parameter is, or a whole tensor, which every rank must give.
    """
    if isinstance(saved, DTensor):
        return saved.to_local()
    if isinstance(parameter, DTensor):
        return distribute_tensor(saved, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    return saved


def whole(tensor: DTensor) -> Tensor:
    """All shards of a tensor as one, on the device, also if they lie in host memory. Every rank must call it."""
    return DTensor.from_local(
        tensor.to_local(),  # copied to the device
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    ).full_tensor()
