"""FSDP2 under Composer, after all that changes modules and before checkpoints are loaded."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.distributed.fsdp2_utils import sync_optimizer_and_model_params
from composer.loggers import Logger
from composer.utils import FSDP2Config, dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.algorithms.sharding import shard


class Sharding(Algorithm):
    """Shards the task as `training.fsdp` says. The trainer adds it last.

    Composer's own wrapping knows one number format for the whole model, and has no way to hand over a mesh. It is told
    to wrap nothing more, and does what remains: checkpoints and resumption.
    """

    def __init__(
        self,
        task: nn.Module,
        *,
        full_shard: bool,
        by_block: bool,
        parameters: Literal["auto", "fp32", "bf16"],
        replicas: int,
        checkpoints: Literal["sharded", "full"],
    ) -> None:
        """See `recipes.config.FSDP`.

        Args:
            task: on any device; its parameters move to this rank's.
            full_shard: free gathered parameters between forward and backward pass.
            by_block: gather a block at once.
            parameters: number format of gathered parameters.
            replicas: groups of devices that each hold the whole model.
            checkpoints: whether each device writes its part.
        """
        self.task = task
        self.full_shard = full_shard
        self.by_block = by_block
        self.parameters = parameters
        self.replicas = replicas
        self.checkpoints = checkpoints
        task._fsdp_wrap = False  # read by Composer

    def composer_config(self) -> FSDP2Config:
        """What Composer must know."""
        warnings.filterwarnings("ignore", message="FSDP2 Config/APIs are experimental")
        warnings.filterwarnings("ignore", message="The _fsdp_wrap attribute will be removed")
        return FSDP2Config(reshard_after_forward=self.full_shard, state_dict_type=self.checkpoints)

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        mesh = self._mesh("cuda" if state.device.name == "gpu" else "cpu")
        low = self.parameters == "bf16" or (self.parameters == "auto" and state.precision == Precision.AMP_BF16)
        with sync_optimizer_and_model_params(state.optimizers[0], state.model):
            units = shard(
                self.task,
                mesh,
                by_block=self.by_block,
                reshard_after_forward=self.full_shard,
                parameters=torch.bfloat16 if low else None,
            )
        print(
            f"fsdp: {'FULL_SHARD' if self.full_shard else 'SHARD_GRAD_OP'} over {mesh.size(-1)} devices x "
            f"{self.replicas}, {units} units gathered in {'bf16 (norms fp32)' if low else 'fp32'}",
            flush=True,
        )
        logger.log_hyperparameters({"fsdp_units": units, "fsdp_shards": mesh.size(-1)})

    def _mesh(self, device: str) -> DeviceMesh:
        world = dist.get_world_size()
        if world % self.replicas:
            raise ValueError(f"training.fsdp.replicas: {self.replicas} does not divide {world} devices")
        shards = world // self.replicas
        if self.replicas == 1:
            return init_device_mesh(device, (shards,), mesh_dim_names=("shard",))
        return init_device_mesh(device, (self.replicas, shards), mesh_dim_names=("replicate", "shard"))
