"""Checkpoints of one engine as the other one's, and sharded ones as full ones. It imports neither engine.

Both hold the same things under other names; `recipes.engines.lightning.checkpoint_format` lists them. Composer's hold
NumPy's arrays and Python's durations besides tensors. They are read with the few types that such a file needs, and
nothing else in it is ever called (`plain_pickles` and `sharded_files`, beside this file).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from data.system.files import atomic_write, point_to
from data.system.freed_memory import give_back_from_now_on
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.checkpoints.legacy import upgraded
from recipes.engines.checkpoints.lever_states import LEVERS, joined
from recipes.engines.checkpoints.plain_pickles import ALLOWED, NOT_WHOLE, damaged, load_plain
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.engines.composer.callback_states import packed, unpacked
from recipes.engines.counts import Counts
from recipes.engines.generators import with_arrays, with_tensors
from recipes.engines.lightning.checkpoint_format import FORMAT, read_file
from recipes.models.legacy_weights import separate_names
from recipes.training.checkpoint_names import KINDS, REST, newest_of_all, resolved

PREFIX = "task."  # of every parameter's name under Composer, whose model holds the task
# Places in sharded checkpoints of both engines whose tensors are large.
MOVED = {("weights",), ("optimizer",), (LEVERS,), ("state", "model"), ("state", "optimizers")}
DURATIONS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
OF_COMPOSER = (  # callbacks that are not of the recipe; all but the last have no state
    "CheckpointSaver", "WholeCheckpoints", "Destination", "EndIfAsked", "EndWorkers", "SaveEarly",
    "Generators",
)  # fmt: skip


def convert(path: Path, engine: str) -> Path:
    """Write a checkpoint as a full one of an engine, beside it; the newest checkpoint is now this one.

    Parameters that had other names in an earlier version get those of this one.

    Args:
        path: of a full checkpoint, of a sharded one (a folder), or a link to one.
        engine: "composer" or "lightning", the engine that is to read it: the other one, or for a sharded checkpoint
            also the one that wrote it.

    Returns:
        The path of the converted checkpoint.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: not a sharded checkpoint, and not a full one of the other engine.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such checkpoint")
    path = resolved(path)
    inner = newest_of_all(path) or newest_of_all(path / "checkpoints") if path.is_dir() else None
    if inner is not None:
        raise ValueError(f"{path}: is a folder of checkpoints; name one of them, such as {inner}")
    of_lightning = (path / REST).is_file() if path.is_dir() else engine == "composer"
    kind = KINDS[engine]
    give_back_from_now_on()
    deferred = Deferred()
    with damaged(f"{path}: {NOT_WHOLE}"):
        if path.is_file() and _is_of(engine, load_plain(path, lazily=True)):
            raise ValueError(
                f"{path}: already a full checkpoint of the engine {engine}; nothing is to be converted for a run with "
                f"training.engine={engine}"
            )
        if not of_lightning:
            state = from_composer(read_composer(path, deferred))
        elif path.is_dir():
            rest, parts = read_file(path / REST), read_parts(path, deferred)
            parts["optimizer"].setdefault("state", {})  # see `_rename`
            state = rest | parts | {LEVERS: joined(rest[LEVERS], parts.get(LEVERS, {}))}
        else:
            state = read_file(path, lazily=True)
        state = upgraded(state)
        epoch, batch = int(state["counts"]["epoch"]), int(state["counts"]["batch"])  # a text could name another folder
        written = state if engine == "lightning" else to_composer(state)
    new = path.parent / kind.name_of(epoch, batch, sharded=False)
    with atomic_write(new) as partial:
        deferred.save(written, partial)
    point_to(path.parent / kind.link, new)
    return new


def _is_of(engine: str, state: Any) -> bool:
    """Whether a full checkpoint is one of an engine."""
    match engine, state:
        case ("lightning", {"format": found}):
            return found == FORMAT
        case ("composer", {"state": {"timestamp": _}}):
            return True
    return False


def read_parts(folder: Path, deferred: Deferred | None = None) -> dict[str, Any]:
    """What ranks have written to a folder with torch.distributed.checkpoint, put together.

    Args:
        folder: of the checkpoint.
        deferred: makes stand-ins for tensors of which a conversion changes no more than the names, which are nearly
            all; None: they are read.

    Raises:
        ValueError: there is nothing that they have written, or more than plain values.
    """
    sharded = Sharded.open(folder)
    return sharded.nested(ALLOWED, deferred, lambda name: _is_moved(sharded.metadata.planner_data[name]))


def _is_moved(path: tuple[Any, ...]) -> bool:
    """Whether a conversion moves a tensor from one place to another one. Those of earlier versions are cut."""
    return (path[:1] in MOVED or path[:2] in MOVED) and not any(separate_names(key) for key in path)


def read_composer(path: Path, deferred: Deferred | None = None) -> dict[str, Any]:
    """A checkpoint of Composer, as Composer nests it. The tensors of a full one stay on the disk until they are used.

    Args:
        path: of the checkpoint.
        deferred: for a sharded one, see `read_parts`.

    Raises:
        ValueError: not one, or one that holds other types than this repository's runs write.
    """
    state = read_parts(path, deferred) if path.is_dir() else load_plain(path, lazily=True)
    inner = state.get("state") if isinstance(state, dict) else None
    if not isinstance(inner, dict) or "timestamp" not in inner:
        raise ValueError(f"{path}: not a checkpoint of Composer; it has no timestamp")
    return state


def from_composer(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A full checkpoint of Composer as one of the engine `lightning`.

    Args:
        checkpoint: as `read_composer` gives it.
    """
    state = checkpoint["state"]
    ((optimizer_name, optimizer),) = state["optimizers"].items()
    timestamp = state["timestamp"]["Timestamp"]
    levers = {name: _without_repr(part) for name, part in state["algorithms"] if name != "RunLevers"}
    callbacks = {name: unpacked(part) for name, part in state["callbacks"].items() if name not in OF_COMPOSER}
    generators = state["callbacks"].get("Generators", {}).get("generators") or checkpoint["rng"]
    return {
        "format": FORMAT,
        "counts": {name: int(timestamp[name]) for name in Counts.names()},
        "weights": {_without(name): tensor for name, tensor in state["model"].items()},
        "optimizer_name": optimizer_name,
        "optimizer": _rename(optimizer, _without),
        "scaler": next(iter(state.get("scaler", {}).values()), {}),
        "data": state["dataset_state"]["train"],
        LEVERS: joined(levers, checkpoint.get(LEVERS, {})),
        "callbacks": callbacks,
        "generators": [with_tensors(part) for part in generators],
    }


def to_composer(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A full checkpoint of the engine `lightning` as one of Composer."""
    counts, data = checkpoint["counts"], checkpoint["data"]
    if not counts["batch_in_epoch"] and data.get("sample_in_epoch"):
        # The epoch has been counted. Composer would count what is left of it, no batch, as one more.
        data = {**data, "epoch": data["epoch"] + 1, "sample_in_epoch": 0}
    groups = checkpoint["optimizer"]["param_groups"]
    generators = [with_arrays(part) for part in checkpoint["generators"]]
    callbacks = dict.fromkeys(OF_COMPOSER, {})  # Composer warns of each that is missing
    callbacks |= {name: packed(part) for name, part in checkpoint["callbacks"].items()}
    timestamp = {
        **{name: 0 for name in ("iteration", "token", "token_in_iteration", "token_in_epoch")},
        **counts,
        "epoch_in_iteration": counts["epoch"],
        **{name: timedelta() for name in DURATIONS},
    }
    schedule = {
        "base_lrs": [group["initial_lr"] for group in groups],
        "last_epoch": counts["batch"],
        "_step_count": counts["batch"] + 1,
        "_get_lr_called_within_step": False,
        "_last_lr": [group["lr"] for group in groups],
        "lr_lambdas": [None for _ in groups],
    }
    state = {
        "model": {PREFIX + name: tensor for name, tensor in checkpoint["weights"].items()},
        "optimizers": {checkpoint["optimizer_name"]: _rename(checkpoint["optimizer"], lambda name: PREFIX + name)},
        "schedulers": {"LambdaLR": schedule},
        "algorithms": [
            ("RunLevers", {"repr": "RunLevers"}),
            *((name, {"repr": name, **part}) for name, part in checkpoint[LEVERS].items()),
        ],
        "callbacks": {**callbacks, "Generators": {"generators": generators}},
        "timestamp": {"Timestamp": timestamp},
        "dataset_state": {"train": data, "eval": {}},
    }
    if checkpoint["scaler"]:
        state["scaler"] = {"GradScaler": checkpoint["scaler"]}
    return {"state": state, "rng": generators}


def _rename(optimizer: dict[str, Any], new_name: Any) -> dict[str, Any]:
    """An optimizer's state with other names of parameters."""
    states = optimizer.get("state", {})  # an empty one leaves no trace in a sharded checkpoint
    return {
        "state": {new_name(name): part for name, part in states.items()},
        "param_groups": [
            {**group, "params": [new_name(name) for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }


def _without(name: str) -> str:
    return name.removeprefix(PREFIX)


def _without_repr(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "repr"}
