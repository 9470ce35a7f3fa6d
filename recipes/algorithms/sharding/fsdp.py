"""The lever of `training.fsdp`: PyTorch's FSDP2."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from data.system.log import log
from recipes.algorithms.modules.activation_checkpointing import recomputed_modules
from recipes.algorithms.modules.compile import Compile
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sharding.shard import check_formats, shard, units_of
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.algorithms.tensor_parallel.lever import TensorParallel
from recipes.training.lever import Lever
from recipes.training.ranks import world_size
from recipes.training.run import Run

FORMAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Sharding(Lever):
    """Shards the task over devices, after other levers have changed modules and before weights are loaded."""

    def __init__(
        self,
        task: nn.Module,
        *,
        full_shard: bool,
        by_block: bool,
        parameters: Literal["auto", "fp32", "bf16"],
        replicas: int,
        sync: Literal["microbatch", "batch"],
        averaging: PowerSGD | None = None,
        scaling: ResblockGradScaling | None = None,
        tensor: TensorParallel | None = None,
        compiled: Compile | None = None,
    ) -> None:
        """See `recipes.config.recipe.FSDP`.

        Args:
            task: the model, on any device; its parameters move to the device of this rank.
            full_shard: free gathered parameters between the forward and the backward pass (FULL_SHARD).
            by_block: gather the parameters of one block at a time instead of the whole model.
            parameters: dtype of gathered parameters.
            replicas: number of groups of devices that each hold the whole model; it divides the number of devices.
            sync: when gradients are reduced over the devices that a parameter is sharded over.
            averaging: the lever that averages gradients between replicas instead of FSDP.
            scaling: the lever that makes blocks compute in fp16.
            tensor: the lever that divides the model first, which acts before this one.
            compiled: the lever that compiles parts of the model, which acts after this one.

        Raises:
            ValueError: blocks with gradient scales in a number format that does not go with sharding.
        """
        if scaling is not None and scaling.matrices is not None:
            raise ValueError(
                "training.fsdp: PyTorch shards no block with parameters of two number formats, which "
                "resblock_grad_scaling makes with weights: fp16; use fp32 weights, or training.fsdp=null"
            )
        if scaling is not None and parameters == "bf16":
            raise ValueError(
                "training.fsdp.parameters: bf16, and resblock_grad_scaling computes in fp16; use auto or fp32"
            )
        self.task = task
        self.full_shard = full_shard
        self.by_block = by_block
        self.parameters = parameters
        self.replicas = replicas
        self.once = sync == "batch"
        self.averaging = averaging
        self.scaling = scaling
        self.tensor = tensor
        self.compiled = compiled
        self.told: bool | None = None  # what FSDP knows of the last backward pass

    def change_modules(self, run: Run) -> None:
        """Change nothing yet: what is gathered at once is known before anything is sharded."""
        units = units_of(self.task, **self._options(run))
        check_formats(self.task, units)
        if self.compiled is not None:
            self.compiled.check_units(units)

    def before_forward(self, run: Run) -> None:
        """Tell FSDP whether the next backward pass reduces gradients over the devices, where that has changed.

        Each call looks for FSDP's units in all modules, which takes the host a millisecond for a large model.
        """
        last = run.last_pass
        if last == self.told:
            return
        self.told = last
        self.task.set_requires_all_reduce(last)  # over replicas, once per batch; until then reduced shards are summed
        if self.once:
            self.task.set_is_last_backward(last)
            self.task.set_requires_gradient_sync(last)
            self.task.set_reshard_after_backward(last or self.full_shard)

    def shard(self, run: Run) -> None:
        device = run.device.type
        shards = world_size() // self.replicas // (1 if self.tensor is None else self.tensor.devices)
        averaging = self.averaging
        dimensions = {}
        if self.tensor is not None:
            mesh = self.tensor.mesh[("shard",) if self.replicas == 1 else ("replicate", "shard")]
        elif averaging is None and self.replicas == 1:
            mesh = _mesh(device, shard=shards)
        else:
            mesh = _mesh(device, replicate=self.replicas, shard=shards)
        if averaging is not None:  # it averages over replicas, so FSDP knows only its own replica
            whole = mesh if self.tensor is None else self.tensor.mesh
            dimensions = averaging.divide(whole, once=self.once)
            mesh = whole["shard"]
        low = self._format(run)
        with run.new_parameters():
            units = shard(
                self.task,
                mesh,
                reshard_after_forward=self.full_shard,
                dimensions=dimensions,
                **self._options(run),
            )
        rest = "what is not in blocks, " * self.by_block
        gathered = "fp32" if low is None else f"{FORMAT_NAMES[low]} ({rest}norms fp32)"
        log.info(
            f"fsdp: {'FULL_SHARD' if self.full_shard else 'SHARD_GRAD_OP'} over {shards} devices x "
            f"{self.replicas}, {units} units gathered in {gathered}"
        )
        run.log_settings({"fsdp_units": units, "fsdp_shards": shards})

    def _options(self, run: Run) -> dict[str, Any]:
        """Arguments of `shard` and `units_of`."""
        recomputed = recomputed_modules(self.task)
        return {"by_block": self.by_block, "parameters": self._format(run), "recomputed": recomputed}

    def _format(self, run: Run) -> torch.dtype | None:
        """The dtype of gathered parameters; None: their own.

        Blocks with gradient scales compute in fp16 anyway: gathering fp16 moves fewer bytes and changes no result.
        """
        if self.scaling is not None:
            return torch.float16 if self.parameters == "auto" and self.by_block else None
        low = self.parameters == "bf16" or (self.parameters == "auto" and run.precision == "amp_bf16")
        return torch.bfloat16 if low else None


def _mesh(device: str, **dimensions: int) -> DeviceMesh:
    return init_device_mesh(device, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
