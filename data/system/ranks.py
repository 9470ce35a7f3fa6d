"""Which process of a job this is, and its share of the work. The processes share nothing but a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Rank:
    """This process among the processes of the job, as `composer -n`, `torchrun` or a scheduler numbers them.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local: number of this process on its machine, which is also the number of its GPU.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Rank:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK, as launchers set them.

        Raises:
            ValueError: one of them or LOCAL_WORLD_SIZE, which others read, is not a number, RANK is not below
                WORLD_SIZE, or LOCAL_WORLD_SIZE is 0.
        """
        values = {}
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
            text = os.environ.get(name) or default
            if not text.isdecimal():
                raise ValueError(f"{name} is {text!r} in the environment: expected a number")
            values[name] = int(text)
        rank, world, local, beside = values.values()
        if not beside:
            raise ValueError("LOCAL_WORLD_SIZE is 0 in the environment: expected 1 or more; unset it")
        if rank >= world:
            raise ValueError(
                f"RANK is {rank} of WORLD_SIZE {world} in the environment: ranks count from 0; unset both "
                "if another job has left them"
            )
        return cls(rank, world, local)

    def share(self, items: list[Item]) -> list[Item]:
        """This rank's items: item k goes to rank k mod world.

        Pass all items, done or not. Ranks that list the remaining ones at different moments would not agree on how to
        divide them. Ranks advance at about the same speed, so the work that is left after an interruption is also
        divided evenly.
        """
        return items[self.rank :: self.world]
