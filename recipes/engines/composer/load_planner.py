"""Selects what Composer reads of a sharded checkpoint.

PyTorch's loader reads what the present state has, and refuses a checkpoint that lacks a part of it. States of callbacks
and levers that have not begun have nothing yet, and the checkpoint may be of fewer ranks. Therefore this planner asks
for what the checkpoint has. Of the random number generators of all ranks, each rank asks for its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.utils import FSDP2Config
from torch import nn
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from recipes.engines.checkpoints.lever_states import LEVERS, State, forms
from recipes.engines.checkpoints.own_load_plan import OwnLoadPlan
from recipes.engines.composer.generators import Generators
from recipes.training.ranks import rank

CALLBACKS = ("state", "callbacks")
SCHEDULERS = "state.schedulers."
# Names of the states of generators: of this repository's callback, and Composer's own.
OF_A_RANK = re.compile(rf"({'.'.join((*CALLBACKS, Generators.__name__, 'generators'))}|rng)\.(?P<rank>\d+)\.")


class LoadPlanner(OwnLoadPlan):
    """Asks for the states of callbacks and the tensors of levers that the checkpoint has.

    Attributes:
        levers: tensors by the names of levers, once they are read.
    """

    def __init__(self, task: nn.Module, own: bool = True) -> None:
        """
        Args:
            task: to be sharded, before anything is loaded.
            own: as of `OwnLoadPlan`.
        """
        super().__init__(own)
        self._task = task
        self.levers: State = {}

    def set_up_planner(
        self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Composer also calls it for other parts of the checkpoint than the state."""
        if "state" in state_dict:
            callbacks = state_dict["state"].get("callbacks", {})
            for name in callbacks:
                if name != Generators.__name__:
                    callbacks[name] = _form(name, metadata)
            self.levers = forms(metadata, self._task)
            state_dict[LEVERS] = self.levers
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = metadata.state_dict_metadata
        self.state_dict = {name: value for name, value in self.state_dict.items() if _is_read(name, name in saved)}

    def plan_of_rank(self) -> LoadPlan:
        """Not PyTorch's: it takes a checkpoint with values that are not asked for for one of PyTorch 2.3."""
        return create_default_local_load_plan(self.state_dict, self.metadata)


@dataclass
class Sharded(FSDP2Config):
    """Composer's settings of a sharded task, with a planner, which it had for FSDP1 alone."""

    planner: LoadPlanner | None = field(default=None, kw_only=True)

    @property
    def load_planner(self) -> LoadPlanner | None:
        """Read by Composer when it loads a sharded checkpoint."""
        return self.planner


def _is_read(name: str, is_saved: bool) -> bool:
    """Whether this rank asks for a part of its state, which otherwise keeps its value. Ranks that the checkpoint has no
    generators of keep their own. Schedulers of newer versions of PyTorch have more values than older ones saved."""
    if of := OF_A_RANK.match(name):
        return is_saved and of["rank"] == str(rank())
    return is_saved or not name.startswith(SCHEDULERS)


def _form(name: str, metadata: Metadata) -> State:
    """Empty values for reading a callback's saved state; none if it is not saved, or in more parts than its keys."""
    saved = {key: path for key, path in metadata.planner_data.items() if path[:3] == (*CALLBACKS, name)}
    if any(len(path) != len(CALLBACKS) + 2 for path in saved.values()):  # of an earlier version
        return {}
    return {path[-1]: _empty(metadata.state_dict_metadata[key]) for key, path in saved.items()}


def _empty(value: Any) -> Any:
    return torch.empty(value.size, dtype=value.properties.dtype) if isinstance(value, TensorStorageMetadata) else None
