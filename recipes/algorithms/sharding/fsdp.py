"""FSDP2 under Composer, after all that changes modules and before checkpoints are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.distributed.fsdp2_utils import sync_optimizer_and_model_params
from composer.loggers import Logger
from composer.utils import FSDP2Config, dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from recipes.algorithms.gradients.accumulation import passes_of_batch
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sharding.shard import shard
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling

FORMAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


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
        sync: Literal["microbatch", "batch"],
        checkpoints: Literal["sharded", "full"],
    ) -> None:
        """See `recipes.config.recipe.FSDP`.

        Args:
            task: on any device; its parameters move to this rank's.
            full_shard: free gathered parameters between forward and backward pass.
            by_block: gather a block at once.
            parameters: number format of gathered parameters.
            replicas: groups of devices that each hold the whole model; they divide the devices.
            sync: when gradients are averaged over the devices that a parameter is divided over.
            checkpoints: whether each device writes its part.
        """
        self.task = task
        self.full_shard = full_shard
        self.by_block = by_block
        self.parameters = parameters
        self.replicas = replicas
        self.once = sync == "batch"
        self.checkpoints = checkpoints
        self.passes = 0  # of the batch, to come
        task._fsdp_wrap = False  # read by Composer

    def composer_config(self) -> FSDP2Config:
        """What Composer must know."""
        warnings.filterwarnings("ignore", message="FSDP2 Config/APIs are experimental")
        warnings.filterwarnings("ignore", message="The _fsdp_wrap attribute will be removed")
        return FSDP2Config(reshard_after_forward=self.full_shard, state_dict_type=self.checkpoints)

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self._shard(state, logger)
        elif event == Event.BEFORE_TRAIN_BATCH:
            self.passes = passes_of_batch(state)
        else:
            self.passes -= 1
            self._synchronise(last=self.passes == 0)

    def _synchronise(self, last: bool) -> None:
        """Say what the next backward pass does with gradients that others have parts of."""
        self.task.set_requires_all_reduce(last)  # over replicas, once a batch: sums of shards wait for it
        if self.once:
            self.task.set_is_last_backward(last)
            self.task.set_requires_gradient_sync(last)
            self.task.set_reshard_after_backward(last or self.full_shard)

    def _shard(self, state: State, logger: Logger) -> None:
        device = "cuda" if state.device.name == "gpu" else "cpu"
        shards = dist.get_world_size() // self.replicas
        averaging = next((a for a in state.algorithms if isinstance(a, PowerSGD)), None)
        placement = None
        if averaging is None and self.replicas == 1:
            mesh = _mesh(device, shard=shards)
        else:
            mesh = _mesh(device, replicate=self.replicas, shard=shards)
        if averaging is not None:  # it averages over the replicas, and FSDP knows of one only
            placement = _by_parameter(averaging.divide(mesh, once=self.once))
            mesh = mesh["shard"]
        low, scaled = self._format(state)
        with sync_optimizer_and_model_params(state.optimizers[0], state.model):
            units = shard(
                self.task,
                mesh,
                by_block=self.by_block,
                reshard_after_forward=self.full_shard,
                parameters=low,
                of_blocks_only=scaled,
                placement=placement,
            )
        gathered = "fp32" if low is None else f"{FORMAT_NAMES[low]} ({'what is not in blocks, ' * scaled}norms fp32)"
        print(
            f"fsdp: {'FULL_SHARD' if self.full_shard else 'SHARD_GRAD_OP'} over {shards} devices x "
            f"{self.replicas}, {units} units gathered in {gathered}",
            flush=True,
        )
        logger.log_hyperparameters({"fsdp_units": units, "fsdp_shards": shards})

    def _format(self, state: State) -> tuple[torch.dtype | None, bool]:
        """Of gathered parameters, and whether it is that of blocks with gradient scales.

        Those compute in fp16 whatever is gathered, so less is gathered and no number changes.
        """
        if any(isinstance(a, ResblockGradScaling) for a in state.algorithms):
            if self.parameters == "bf16":
                raise ValueError(
                    "training.fsdp.parameters: bf16, and resblock_grad_scaling computes in fp16; use auto or fp32"
                )
            low = self.parameters == "auto" and self.by_block
            return (torch.float16 if low else None), low
        low = self.parameters == "bf16" or (self.parameters == "auto" and state.precision == Precision.AMP_BF16)
        return (torch.bfloat16 if low else None), False


def _mesh(device: str, **dimensions: int) -> DeviceMesh:
    return init_device_mesh(device, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def _by_parameter(dimensions: dict[int, Shard]) -> Callable[[nn.Parameter], Shard | None]:
    return lambda parameter: dimensions.get(id(parameter))
