"""How a process leaves the process groups of torch.distributed."""

from __future__ import annotations

from torch import distributed


def leave() -> None:
    """Destroy all process groups of this process, which ends or goes on without them. Every rank must call it.

    A thread of gloo may still hold the tensors of the last collective, which it frees once it has Python's lock.
    `destroy_process_group` alone would wait for that thread and keep the lock: for ever. If the interpreter ended
    without it, the thread would abort the process ("terminate called without an active exception",
    github.com/pytorch/pytorch/issues/190489). The objects of the backends give the lock away while they wait.
    """
    groups = list(distributed.distributed_c10d._world.pg_map)
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    del groups
    distributed.destroy_process_group()
    del backends  # the last references, which end the threads
