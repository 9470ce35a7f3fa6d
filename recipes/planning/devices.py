"""The devices of a run, and how many of them do what."""

from __future__ import annotations

import os
import re
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
            ValueError: a variable is not a number of devices, or a machine has more than all; or see `of`.
        """
        world = _devices_in("WORLD_SIZE", training.tensor_parallel)
        machine = _devices_in("LOCAL_WORLD_SIZE", world)
        if machine > world:
            raise ValueError(
                f"LOCAL_WORLD_SIZE: {machine} devices of each machine are more than all {world} (WORLD_SIZE)"
            )
        return cls.of(training, world, machine)

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


def _devices_in(variable: str, default: int) -> int:
    """The number of devices in a variable of the environment. Raises ValueError where it is none."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError(f"{variable}: {text!r} is not a number of devices; set it to 1 or more, or unset it")
    return int(text)
