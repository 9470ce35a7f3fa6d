"""Writes sharded checkpoints, and selects what each rank writes: its shards, unless a replica before has the same ones;
and the first rank everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from recipes.engines.checkpoints.batch_marks import MarkedFiles
from recipes.engines.checkpoints.checksums import checksums


def save_sharded(values: dict[str, Any], folder: Path, batch: int, **options: Any) -> None:
    """Write a sharded checkpoint, with checksums of what is no tensor. Every rank must call it.

    Args:
        values: what `torch.distributed.checkpoint.save` takes.
        folder: to write.
        batch: that it is of.
        options: of `DefaultSavePlanner`.
    """
    with checksums(False):
        dcp.save(values, storage_writer=MarkedFiles(folder, batch), planner=SavePlanner(**options))


class SavePlanner(DefaultSavePlanner):
    """PyTorch's planner has every rank plan to write every value, and the first rank choose one of the plans.

    Values that are no shards are the same on all ranks, such as counts and the states of all ranks' random number
    generators, of which there are more with each rank. So the number of plans would grow as its square: with 1,024
    ranks, millions in the memory of the first one, in each checkpoint. Replicas of a model have the same shards, also
    where FSDP knows of its own replica alone, as with powersgd.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See DefaultSavePlanner; the coordinator is the first rank."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if not is_coordinator:
            self.state_dict = {name: value for name, value in self.state_dict.items() if _is_first_shard(value)}
            self.mappings = {name: self.mappings[name] for name in self.state_dict}

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """See DefaultSavePlanner, which calls `torch.save` here for what is no tensor."""
        with checksums(True):
            return super().transform_object(write_item, object)


def _is_first_shard(value: Any) -> bool:
    """Whether a value is a shard of this rank, and of no replica before its own."""
    if not isinstance(value, DTensor) or value.device_mesh.mesh.min() > 0:  # the mesh of another replica alone
        return False
    places = value.device_mesh.get_coordinate() or []
    return not any(place for place, of in zip(places, value.placements, strict=False) if of.is_replicate())
