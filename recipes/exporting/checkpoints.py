"""The weights in a checkpoint of either engine, whole or sharded, without the trainer or the devices that wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from recipes.engines.checkpoints.conversion import PREFIX
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.checkpoints.legacy import upgraded
from recipes.engines.checkpoints.lever_states import LEVERS, joined
from recipes.engines.checkpoints.plain_pickles import ALLOWED, NOT_WHOLE, damaged, load_plain
from recipes.engines.checkpoints.sharded_files import METADATA, Sharded
from recipes.engines.lightning.checkpoint_format import FORMAT, read_file
from recipes.generation.exports import Weights
from recipes.models.legacy_weights import separate_names
from recipes.training.checkpoint_names import REST, last_written, resolved

AVERAGE = "ScheduledEMA"


@dataclass(frozen=True)
class Checkpoint:
    """What an export takes of a checkpoint.

    Attributes:
        path: where it was read from.
        weights: the task's tensors, by its own names.
        average: the averaged ones of its trained parameters; empty if the run had no average yet.
        batches, samples: that the run had trained on.
    """

    path: Path
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    batches: int
    samples: int


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that `path` is or, if it is the folder of a run, the newest one in it; None if it is neither.

    Args:
        path: a file, a folder of a sharded checkpoint, a link to one of them, or a run's folder.
    """
    if path.is_file() or (path / METADATA).is_file():
        return resolved(path)
    return last_written(path / "checkpoints")


def read_checkpoint(path: Path, only: Weights | None = None, deferred: Deferred | None = None) -> Checkpoint:
    """The weights of a checkpoint. A whole one's stay on the disk until they are used.

    Args:
        path: as `find_checkpoint` gives it.
        only: of a sharded one, read what this kind of weights needs and no more: with ema, no weights that have an
            average; with raw, no averages. None: all.
        deferred: makes stand-ins for tensors of a sharded one, of which parts must be put together, except for those of
            earlier versions with other shapes; None: they are read.

    Raises:
        FileNotFoundError, ValueError: not a whole checkpoint of this repository's runs.
    """
    with damaged(f"{path}: {NOT_WHOLE}"):
        return _sharded(path, only, deferred) if path.is_dir() else _full(path)


def _full(path: Path) -> Checkpoint:
    state = load_plain(path, lazily=True)
    if isinstance(state, dict) and state.get("format") == FORMAT:
        return _of_lightning(path, state)
    if isinstance(state, dict) and "timestamp" in state.get("state", {}):
        state = state["state"]
        return _of_composer(path, state["model"], dict(state["algorithms"]), state["timestamp"]["Timestamp"])
    raise ValueError(f"{path}: not a checkpoint of a run; give one of runs/<run_name>/checkpoints")


def _sharded(path: Path, only: Weights | None, deferred: Deferred | None) -> Checkpoint:
    """Only the weights and their averages are read, not the optimizer's state."""
    sharded = Sharded.open(path)

    def values(wanted: Callable[[str], bool], allowed: Iterable[Any] = ()) -> dict[str, Any]:
        return sharded.values(wanted, allowed, deferred, lambda name: separate_names(name) is None)

    of_average = f"{LEVERS}.{AVERAGE}.average."
    average = _under(of_average, values(lambda name: only != "raw" and name.startswith(of_average)))
    shards = {AVERAGE: {"average": average}} if average else {}  # earlier versions have it in the lever's state
    replaced = average if only == "ema" else {}

    def of_weights(name: str, prefix: str) -> bool:
        return name.startswith(prefix) and name.removeprefix(prefix) not in replaced

    if (path / REST).is_file():
        weights = _under("weights.", values(lambda name: of_weights(name, "weights.")))
        rest = read_file(path / REST)
        return _of_lightning(path, {**rest, "weights": weights, LEVERS: joined(rest[LEVERS], shards)})
    model, times = "state.model.", "state.timestamp.Timestamp."
    rest = ("state.algorithms", times)
    found = values(lambda name: of_weights(name, model + PREFIX) or name.startswith(rest), ALLOWED)
    weights = _under(model, found)
    if not (weights or replaced) or "state.algorithms" not in found:
        raise ValueError(f"{path}: not a checkpoint of a run; it holds no weights under state.model")
    levers = joined(dict(found["state.algorithms"]), shards)
    return _of_composer(path, weights, levers, _under(times, found))


def _under(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _of_lightning(path: Path, state: dict[str, Any]) -> Checkpoint:
    counts = state["counts"]
    return _checkpoint(path, state["weights"], state[LEVERS], counts["batch"], counts["sample"])


def _of_composer(path: Path, weights: dict[str, Tensor], levers: dict[str, Any], times: dict[str, Any]) -> Checkpoint:
    return _checkpoint(path, weights, levers, int(times["batch"]), int(times["sample"]), PREFIX)


def _checkpoint(
    path: Path, weights: dict[str, Tensor], levers: dict[str, Any], batch: int, sample: int, prefix: str = ""
) -> Checkpoint:
    average = levers.get(AVERAGE, {}).get("average", {})
    earlier = all(name in weights for name in average)  # a version whose averages had Composer's names of weights
    return Checkpoint(path, _plain(weights, prefix), _plain(average, prefix if earlier else ""), batch, sample)


def _plain(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Contiguous ones, as safetensors wants them, by the task's names: without Composer's name of the task, and with
    this version's names."""
    return {name.removeprefix(prefix): tensor.contiguous() for name, tensor in upgraded(tensors).items()}
