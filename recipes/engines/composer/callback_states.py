"""States of callbacks in Composer's checkpoints: each is one value, which a sharded checkpoint keeps as it is.

PyTorch takes the dicts and lists of a sharded checkpoint apart, and its loader asks for those parts that the present
state has. A callback that has counted nothing yet would get nothing, and one that counts in a list would end the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

WHOLE = "whole"  # key of the state of a callback, in a tuple, which PyTorch does not take apart
PLACE = ("state", "callbacks")


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a callback as checkpoints hold it; empty if it is."""
    return {WHOLE: (state,)} if state else {}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a callback from a checkpoint. Earlier versions did not pack it."""
    return state[WHOLE][0] if WHOLE in state else state


@contextmanager
def of_checkpoint(*, but: str) -> Iterator[None]:
    """Inside, the loader of sharded checkpoints asks for the states of callbacks that the checkpoint has.

    Args:
        but: the callback that is left as it is.
    """
    theirs = DefaultLoadPlanner.set_up_planner

    def set_up_planner(
        self: DefaultLoadPlanner, state_dict: dict[str, Any], metadata: Metadata, *arguments: Any, **keys: Any
    ):
        callbacks = state_dict.get("state", {}).get("callbacks", {})
        for name in callbacks:
            if name != but:
                callbacks[name] = _form(name, metadata)
        theirs(self, state_dict, metadata, *arguments, **keys)

    DefaultLoadPlanner.set_up_planner = set_up_planner
    try:
        yield
    finally:
        DefaultLoadPlanner.set_up_planner = theirs


def _form(name: str, metadata: Metadata) -> dict[str, Any]:
    """What the saved state of a callback is read into; empty if there is none, or one in more parts than its keys."""
    saved = {key: path for key, path in metadata.planner_data.items() if path[:3] == (*PLACE, name)}
    if any(len(path) != len(PLACE) + 2 for path in saved.values()):  # of an earlier version
        return {}
    return {path[-1]: _empty(metadata.state_dict_metadata[key]) for key, path in saved.items()}


def _empty(value: Any) -> Any:
    return torch.empty(value.size, dtype=value.properties.dtype) if isinstance(value, TensorStorageMetadata) else None
