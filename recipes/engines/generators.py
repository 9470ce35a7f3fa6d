"""Random number generators: seeds, and their states in checkpoints."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.system.log import log
from recipes.training.ranks import rank, world_size


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def generator_states() -> list[dict[str, Any]]:
    """The states of this process's generators on every rank, by rank. Every rank must call it."""
    state = own_generators()
    if world_size() == 1:
        return [state]
    states: list[dict[str, Any]] = [{}] * world_size()
    dist.all_gather_object(states, state)
    return states


def own_generators() -> dict[str, Any]:
    """The states of this process's generators: tensors and plain values only, so that a checkpoint needs no unpickling
    of other types."""
    state = with_tensors(
        {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(states: list[dict[str, Any]]) -> None:
    """Set this rank's generators to what `generator_states` gave.

    A rank that the checkpoint has no state of keeps its own.
    """
    if len(states) != world_size():
        log.warning(f"generators: the checkpoint has those of {len(states)} ranks, this run has {world_size()} ranks")
    if rank() >= len(states):
        return
    state = with_arrays(states[rank()])
    check_position(state)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def set_apart() -> None:
    """Seed the generators of PyTorch anew where a rank below has the same state. Every rank must call it.

    The devices of a tensor parallel group draw the same numbers. In a checkpoint of theirs, neighbouring ranks have the
    same states; where a run goes on with smaller groups, ranks with different samples would draw the same numbers.
    Where it goes on with the same groups, `TensorParallel` gives them the state of their first device again.
    """
    if world_size() == 1:
        return
    digests = [""] * world_size()
    dist.all_gather_object(digests, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
    if digests[rank()] in digests[: rank()]:
        torch.manual_seed(int(torch.randint(1 << 62, ())) + rank())


def check_position(state: dict[str, Any]) -> None:
    """Whether NumPy's generator can have a state of a checkpoint: it does not ask, and reads what lies behind its
    numbers.

    Raises:
        ValueError: its position is not in them.
    """
    position = state["numpy"][2]
    if not 0 <= position <= len(state["numpy"][1]):
        raise ValueError(f"generators: the checkpoint is damaged: NumPy's is at {position} of its numbers")


def with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The states of a rank's generators with a tensor in the place of NumPy's array."""
    algorithm, keys, *rest = state["numpy"]
    return {**state, "numpy": (algorithm, torch.from_numpy(keys.astype(np.int64)), *rest)}


def with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `with_tensors`."""
    algorithm, keys, *rest = state["numpy"]
    return {**state, "numpy": (algorithm, keys.numpy().astype(np.uint32), *rest)}
