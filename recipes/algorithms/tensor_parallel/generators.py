"""Random numbers on the devices of a group: the same outside of divided regions, other ones inside.

All devices of a group draw from the same state of PyTorch's global generators, which checkpoints hold. Inside a divided
region each of them draws from a generator that is seeded by a number from the global one and by its place in the group
(Shoeybi et al. 2019, section 3, keep a second generator instead). A region that is computed again, or a run that is
resumed, finds the same global state, and so draws the same numbers, inside and outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def share_generators(group: ProcessGroup, device: torch.device) -> None:
    """Give all devices of a group the states of the first one's global generators. All of them must call it."""
    first = dist.get_global_rank(group, 0)

    def share(state: torch.Tensor) -> torch.Tensor:
        sent = state.to(device)
        dist.broadcast(sent, first, group=group)
        return sent.cpu()

    torch.set_rng_state(share(torch.get_rng_state()))
    if device.type == "cuda":
        torch.cuda.set_rng_state(share(torch.cuda.get_rng_state(device)), device)


@contextmanager
def own_generators(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """A context in which this device's global generators have their own state; after it they go on as on the others."""
    seed = int(torch.randint(1 << 62, ()))  # on the host, which waits for no device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed + dist.get_rank(group))
        yield
