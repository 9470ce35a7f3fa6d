"""States of levers in checkpoints. DTensors in them, such as averages of sharded parameters, are saved as weights are.

A full checkpoint has them whole. Of a sharded one each rank writes its shards, and reads those that it needs. These are
at the checkpoint's root under `LEVERS`, nested as in the states, which have all other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from recipes.algorithms.sharding.shards import as_shard, own, whole
from recipes.engines.checkpoints.plain_pickles import loadable
from recipes.training.hooks import Hooks
from recipes.training.lever import Lever
from recipes.training.ranks import is_first_rank

LEVERS = "levers"
State = dict[str, Any]


def kept_state(name: str, hooks: Hooks) -> State:
    """The state of a lever or callback for a checkpoint.

    Args:
        name: its own in checkpoints.
        hooks: the lever or callback.

    Raises:
        ValueError: no run could go on from the checkpoint. Of DTensors those that are in dicts of levers are saved
            whole or by all ranks; others would be saved without the shards of other ranks, in a form that is not read.
    """
    state = loadable(name, hooks.state_dict())
    if not isinstance(state, dict):
        raise ValueError(f"{name}: state_dict returns an instance of {type(state).__name__}; return a dict")
    of_lever = isinstance(hooks, Lever)
    if of_lever and "repr" in state:
        raise ValueError(f"{name}: state_dict returns the key 'repr', which Composer has for itself; use another one")
    if _holds_shards(state, in_dicts=not of_lever):
        places = "those of a lever as values of dicts, by the names of parameters, others" if of_lever else "it"
        raise ValueError(
            f"{name}: state_dict returns a sharded tensor (DTensor) where checkpoints cannot hold it; return {places} "
            "as whole tensors, which full_tensor() gives if every rank calls it"
        )
    return state


def _holds_shards(value: Any, in_dicts: bool) -> bool:
    """Whether there are DTensors in a value, other than as values of a dict of dicts unless these count, too."""
    if isinstance(value, dict):
        return any(
            _holds_shards(inner, in_dicts) for inner in value.values() if in_dicts or not isinstance(inner, DTensor)
        )
    if isinstance(value, list | tuple):
        return any(_holds_shards(inner, in_dicts=True) for inner in value)
    return isinstance(value, DTensor)


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


def separated(state: State, parameters: Mapping[str, Tensor], lever: str = "") -> tuple[State, State]:
    """For a sharded checkpoint: a state without its DTensors, and these alone, both nested as the state is.

    Args:
        state: of all levers, by their names.
        parameters: of the task.
        lever: whose state it is, in the recursion.

    Raises:
        ValueError: one has another name than a parameter of its shape, by which `forms` knows how it is sharded.
    """
    rest: State = {}
    shards: State = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            if key not in parameters or parameters[key].shape != value.shape:
                raise ValueError(
                    f"{lever}: state_dict returns the sharded tensor {key!r}, and sharded checkpoints hold them by the "
                    "names of the parameters that are sharded alike; use these, or training.fsdp.checkpoints=full"
                )
            shards[key] = value
        elif isinstance(value, dict):
            rest[key], inner = separated(value, parameters, lever or key)
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
