"""The position of training data in checkpoints, which a data component of one's own may make of anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipes.engines.checkpoints.plain_pickles import loadable
from recipes.training.ranks import world_size


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader or its data set, if a run can go on from it. Every rank must call it.

    Args:
        state: what its `state_dict` returned.

    Raises:
        ValueError: it is no dict or holds values that are not loaded from checkpoints, or ranks have different ones:
            checkpoints hold that of the first rank, and all would go on with its samples.
    """
    loadable("data: the loader", state)
    if world_size() > 1:
        digests = [""] * world_size()
        own = hashlib.sha256(repr(_plain(state)).encode()).hexdigest()
        dist.all_gather_object(digests, own)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise ValueError(
                f"data: state_dict of the loader returns something else on rank {other} than on the first, whose state "
                "all ranks get when a run goes on; return the same on all, such as the number of samples that all "
                "ranks have seen (data/loading.py)"
            )
    return state


def _plain(value: Any) -> Any:
    """A state with digests in the place of tensors and arrays, such as an order of all samples, of which lists would
    take many times the memory; its keys, and values of sets, in one order, which is another one in each process."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _plain(item)) for key, item in value.items()), key=lambda item: item[0])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else value
