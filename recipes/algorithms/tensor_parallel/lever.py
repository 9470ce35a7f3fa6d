"""The lever of `training.tensor_parallel`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from data.system.log import log
from recipes.algorithms.tensor_parallel.divide import divide
from recipes.algorithms.tensor_parallel.generators import share_generators
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.ranks import world_size
from recipes.training.run import Run


class TensorParallel(Lever):
    """Divides the model's matrices over neighbouring devices, after other levers have changed modules.

    Attributes:
        mesh: all devices, (replicas, shards, devices), named "replicate", "shard" and "tensor". FSDP2 takes its
            dimensions from it, since all parameters must lie on parts of one mesh.
    """

    mesh: DeviceMesh

    def __init__(self, task: Task, *, devices: int, replicas: int, sharded: bool, sequence: bool) -> None:
        """
        Args:
            task: the model, which has a plan, whole and on any device; its parameters move to the device of this rank.
            devices: number of devices that divide each matrix.
            replicas: number of device groups that each hold the whole model.
            sharded: whether FSDP2 shards the divided model.
            sequence: whether the residual stream's positions are divided, too, in training.
        """
        self.task = task
        self.devices = devices
        self.replicas = replicas
        self.sharded = sharded
        self.sequence = sequence
        self.alike = False  # whether a group's devices draw from the same state

    def shard(self, run: Run) -> None:
        shards = world_size() // self.replicas // self.devices
        names = ("replicate", "shard", "tensor")
        self.mesh = init_device_mesh(run.device.type, (self.replicas, shards, self.devices), mesh_dim_names=names)
        with run.new_parameters():
            divide(self.task, self.task.tensor_plan(), self.mesh["tensor"], run.device, self.sequence)
            if not self.sharded:
                # A unit of FSDP2 without parameters, so that nothing is gathered or averaged. Engines, exports and
                # sample grids then treat the task as what it is: each rank has a part.
                fully_shard(self.task, mesh=self.mesh["shard"], ignored_params=set(self.task.parameters()))
        positions = ", and positions of the residual stream" if self.sequence else ""
        log.info(f"tensor_parallel: matrices{positions} divided over {self.devices} of {world_size()} devices")
        run.log_settings({"tensor_parallel": self.devices, "sequence_parallel": self.sequence})

    def before_passes(self, run: Run) -> None:
        """Engines seed each rank by its number, and restore ranks by their numbers, also on other numbers of devices.

        From the first batch of this process on, all devices of a group draw the same numbers.
        """
        if not self.alike:
            share_generators(self.mesh.get_group("tensor"), run.device)
            self.alike = True
