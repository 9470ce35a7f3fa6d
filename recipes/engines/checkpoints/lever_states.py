"""States of levers in checkpoints. DTensors in them, such as averages of sharded parameters, are saved as weights are.

A full checkpoint has them whole. Of a sharded one each rank writes its shards, and reads those that it needs. These are
at the checkpoint's root under `LEVERS`, nested as in the states, which have all other values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from recipes.algorithms.sharding.shards import as_shard, own, whole
from recipes.training.ranks import is_first_rank

LEVERS = "levers"
State = dict[str, Any]


@torch.no_grad()
def gathered(state: State) -> State:
    """For a full checkpoint: a state whose DTensors are whole and in host memory on the first rank, and None on others.

    They are gathered one after another. Every rank must call it.
    """
    found: State = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            tensor = whole(value)
            value = tensor.cpu() if is_first_rank() else None
        found[key] = gathered(value) if isinstance(value, dict) else value
    return found


def separated(state: State) -> tuple[State, State]:
    """For a sharded checkpoint: a state without its DTensors, and these alone, both nested as the state is."""
    rest: State = {}
    shards: State = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            shards[key] = value
        elif isinstance(value, dict):
            rest[key], inner = separated(value)
            if inner:
                shards[key] = inner
        else:
            rest[key] = value
    return rest, shards


def joined(rest: State, shards: State) -> State:
    """The inverse of `separated`."""
    found = dict(rest)
    for key, value in shards.items():
        found[key] = joined(rest.get(key, {}), value) if isinstance(value, dict) else value
    return found


@torch.no_grad()
def forms(metadata: Metadata, task: nn.Module) -> State:
    """Memory for this rank's shards of what `separated` took out, by the states' names; the loader is to fill it.

    It is host memory, also on a GPU: an average that is kept there may not fit on the device.

    Args:
        metadata: of the sharded checkpoint.
        task: as it is sharded now. Each tensor is sharded as the parameter is whose name is its last key.

    Raises:
        ValueError: the tensors are of other parameters.
    """
    parameters = dict(task.named_parameters())
    found: State = {}
    for name, path in metadata.planner_data.items():
        if path[0] != LEVERS:
            continue
        saved, parameter = metadata.state_dict_metadata[name], parameters.get(path[-1])
        if parameter is None or parameter.shape != saved.size:
            raise ValueError(
                f"a sharded checkpoint: {name} has shape {tuple(saved.size)}, but the model has "
                + ("no such parameter" if parameter is None else f"a parameter of shape {tuple(parameter.shape)}")
            )
        at = found
        for key in path[1:-1]:
            at = at.setdefault(key, {})
        local = torch.empty_like(own(parameter), dtype=saved.properties.dtype, device="cpu")
        at[path[-1]] = as_shard(parameter, local)
    return found
