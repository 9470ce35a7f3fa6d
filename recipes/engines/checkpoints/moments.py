"""Parameters of which a checkpoint has no moments: those that had no gradient before it was saved.

Optimizers have no state of them then, and some have none of any parameter. PyTorch asks a checkpoint for the state of
each trained parameter, and fails where it finds none. What a checkpoint lacks stays as in a new optimizer.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

State = dict[str, Any]
Path = tuple[Any, ...]


def add_empty(optimizer: State) -> None:
    """Give an optimizer's state of a full checkpoint, in place, an empty state of each parameter without one."""
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            optimizer["state"].setdefault(name, {})


def without_missing(asked: State, paths: dict[str, Path], metadata: Metadata) -> State:
    """What can be read of a sharded checkpoint: parameters of which it has no moments keep those of a new optimizer.

    Args:
        asked: values by their names in the checkpoint.
        paths: of these names, the keys under which they are.
        metadata: of the checkpoint.
    """
    saved = {path[:-1] for path in metadata.planner_data.values()}
    return {name: value for name, value in asked.items() if not _is_moment(paths[name]) or paths[name][:-1] in saved}


def check_all_asked(paths: dict[str, Path], metadata: Metadata) -> None:
    """
    Args:
        paths: of the names of values that are read of a sharded checkpoint, the keys under which they are.
        metadata: of the checkpoint.

    Raises:
        ValueError: it has moments that PyTorch does not ask for, as the optimizer has them only after some steps: they
            would be those of a new optimizer.
    """
    asked = {path for path in paths.values() if _is_moment(path)}
    parameters = {path[:-1] for path in asked}
    if not any("param_groups" in path for path in paths.values()):
        return  # without the optimizer
    for path in metadata.planner_data.values():
        if _is_moment(path) and path not in asked and (not asked or path[:-1] in parameters):
            raise ValueError(
                f"optimizer: the sharded checkpoint has {path[-1]!r} of {path[-2]}, which the optimizer does not make "
                "in its first step, so that it would not be loaded; let the first step make all states, or go on "
                "without training.fsdp from a full checkpoint, which recipes/convert_checkpoint.py makes of it"
            )


def _is_moment(path: Path) -> bool:
    """Whether a path ends in the state of an optimizer, a parameter's name and that of a moment."""
    # of Lightning, and of Composer, which has the class of the optimizer in between
    return path[-3:-2] == ("state",) and (path[:-3] == ("optimizer",) or path[:-4] == ("state", "optimizers"))
