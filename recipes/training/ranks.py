"""Communication between ranks, whichever engine started them. A single process needs no process group."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from data.system.disk_errors import may_pass
from data.system.errors import Outage, visible

_calls = count()  # of `by_first_rank`, the same on all ranks
# As gloo, NCCL and the key-value store say it.
_LOST = re.compile(r".*(Connection (closed|reset) by peer|remote process exit|ailed to recv, got 0|Broken pipe).*")
_OPERATIONS = {"SUM": dist.ReduceOp.SUM, "MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX}


def rank() -> int:
    """The number of this process among all processes of the run."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Whether this is rank 0, the process that writes files."""
    return rank() == 0


def all_reduce(tensor: Tensor, operation: Literal["SUM", "MIN", "MAX"] = "SUM") -> None:
    """Reduce a tensor over all ranks, in place. Every rank must call it, with the same shape and dtype."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPERATIONS[operation])


def smallest(value: int, device: torch.device) -> int:
    """The minimum of a value over all ranks. Every rank must call it."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    all_reduce(tensor, "MIN")
    return int(tensor.item())


def all_gather(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, in the order of ranks. Every rank must call it, with the same shape and dtype."""
    if world_size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(found, tensor)
    return found


def from_first_rank(value: Any) -> Any:
    """Broadcast the value of the first rank, any picklable object. Every rank must call it."""
    if world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def on_all_ranks(act: Callable[[], Any]) -> Any:
    """Call a function on every rank. Where it fails on some, all end with one message, and none waits for another.

    Args:
        act: called on every rank; without communication.

    Returns:
        What the function returned on this rank.

    Raises:
        ValueError: the function failed on another rank, with an `Outage` if it `may_pass`. A rank on which it failed
            raises its own error.
    """
    found, error = None, None
    try:
        found = act()
    except Exception as caught:
        error = caught
    told = [None if error is None else (str(error), may_pass(error))] * world_size()
    if world_size() > 1:
        dist.all_gather_object(told, told[0])
    if error is not None:
        raise error
    for failure in told:
        if failure is not None:
            raise _told_error(*failure)
    return found


def _told_error(text: str, outage: bool) -> ValueError:
    return Outage(text) if outage else ValueError(text)


def wait() -> None:
    """Wait for all ranks. Every rank must call it."""
    if world_size() > 1:
        # Before its first collective NCCL does not know the GPU of this process, and would take the one whose number is
        # that of the rank modulo the machine's GPUs: another rank's, where runs do not use all GPUs of their machines.
        own = [torch.cuda.current_device()] if "nccl" in dist.get_backend() else None
        dist.barrier(device_ids=own)


@contextmanager
def says_that_another_ended() -> Iterator[None]:
    """A context in which a rank that loses the connection to another one ends with one line and status 1.

    Mostly the other rank has ended and says why, which a traceback of the library for communication would hide. It may
    also be the network, so the line holds what the library says, with the address of the other rank.
    """
    try:
        yield
    except RuntimeError as error:
        lost = _LOST.search(str(error))
        if world_size() == 1 or lost is None:
            raise
        text = "the connection to another rank is lost; if that one has ended, see what it says"
        print(visible(f"error: rank {rank()}: {text} ({lost[0].strip()})"), file=sys.stderr)
        sys.exit(1)


def by_first_rank(act: Callable[[], Any]) -> Any:
    """Call a function on the first rank, while the other ranks wait for it. Every rank must call it.

    Use it for what may take longer than the time limit of a collective, such as a copy to an object store. The other
    ranks ask the key-value store of the process group, which has no such limit, and whose connection breaks where the
    process that holds it has died.

    Args:
        act: called on the first rank only.

    Returns:
        What the function returned, on all ranks; any picklable object.

    Raises:
        ValueError: the function failed on the first rank, with an `Outage` if it `may_pass`. The first rank raises
            its own error. The message is the same.
    """
    if world_size() == 1:
        return act()
    store, key = dist.distributed_c10d._get_default_store(), f"by_first_rank/{next(_calls)}"
    found, error = None, None
    if is_first_rank():
        try:
            found = act()
        except Exception as caught:
            error = caught
        store.set(key, json.dumps(None if error is None else (str(error), may_pass(error))))
    else:
        begun = time.monotonic()
        while not store.check([key]):
            # No rank waits a quarter longer than the first one takes; a thousand of them ask one store.
            time.sleep(min(max(0.01, (time.monotonic() - begun) / 4), 1.0))
        failure = json.loads(store.get(key))
        error = None if failure is None else _told_error(*failure)
    wait()  # all know the answer before the first rank may end, and the store with it
    if error is not None:
        raise error
    return from_first_rank(found)
