"""The devices of a run, and how many of them do what."""

from __future__ import annotations

import os
from dataclasses import dataclass

from recipes.config.recipe import Training


@dataclass(frozen=True)
class Devices:
    """The devices of a run: world = replicas * shards * tensor.

    Attributes:
        world: number of devices.
        replicas: groups of devices that each hold the whole model, divided over the group.
        tensor: devices that divide the matrices of each layer and compute the same samples.
    """

    world: int
    replicas: int
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Devices that FSDP shards each weight, or each part of a divided matrix, over."""
        return self.world // self.replicas // self.tensor

    @classmethod
    def of(cls, training: Training, world: int, machine: int) -> Devices:
        """The devices of a recipe's `training` section.

        Args:
            training: the section.
            world: number of devices.
            machine: number of devices in each machine.

        Raises:
            ValueError: tensor parallel groups or replicas do not divide the devices, or a machine.
        """
        groups = training.groups(world, machine)
        tensor = training.tensor_parallel
        replicas = groups if training.fsdp is None else training.fsdp.replicas_in(world, machine, tensor)
        return cls(world, replicas, tensor)

    @classmethod
    def of_environment(cls, training: Training) -> Devices:
        """The devices that the launcher's variables give: WORLD_SIZE (default: as many as one model needs), of which
        LOCAL_WORLD_SIZE are in each machine (default: all).

        Raises:
            ValueError: see `of`.
        """
        world = int(os.environ.get("WORLD_SIZE", training.tensor_parallel))
        return cls.of(training, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))

    def check_groups(self, training: Training) -> None:
        """Whether something averages the gradients of tensor parallel groups.

        Raises:
            ValueError: nothing does.
        """
        if training.fsdp is None and self.tensor > 1 and self.replicas > 1:
            raise ValueError(
                f"training.tensor_parallel: {self.tensor} leaves {self.replicas} groups of devices, between which only "
                "FSDP averages gradients; set training.fsdp={}"
            )
