"""Whether all machines of a run see the folder in which its first rank writes. Without it, a run trains, and cannot be
resumed: only one machine has the newest checkpoint, or each has a part of it."""

from __future__ import annotations

import os
import platform
import secrets
import time
from pathlib import Path

import torch.distributed as dist

from data.system.disk_errors import about
from recipes.training.ranks import by_first_rank, world_size

PATIENCE = 60.0  # seconds: what mounts a bucket as a folder may look for new files once a minute
SHOWN = 3  # machines that are named


def check_shared(output: Path) -> None:
    """Write a file on the first rank, and look for it on all. Every rank must call it.

    Args:
        output: folder of the run, by the path that this rank has been given.

    Raises:
        ValueError: on all ranks: it is another folder on other machines.
    """
    if world_size() == 1:
        return
    mark = output / by_first_rank(lambda: _new_mark(output))
    end = time.monotonic() + PATIENCE
    while not (seen := mark.exists()) and time.monotonic() < end:
        time.sleep(1)
    told: list[tuple[str, bool]] = [("", True)] * world_size()
    dist.all_gather_object(told, (platform.node(), seen))
    by_first_rank(lambda: mark.unlink(missing_ok=True))
    without = sorted({machine for machine, found in told if not found})
    if without:
        more = f" and {len(without) - SHOWN} more machines" if len(without) > SHOWN else ""
        raise ValueError(
            f"output: {', '.join(without[:SHOWN])}{more} cannot see {output.absolute()} of {told[0][0]}, so that no "
            "checkpoint could be loaded there; give a folder on a file system that all machines share, or set "
            "checkpoints.save=false"
        )


def _new_mark(output: Path) -> str:
    """The name of a new file, which the next start removes if this one is killed (`remove_halves`)."""
    name = f".shared.json.{secrets.token_hex(8)}.{os.getpid()}"
    with about(output / name):
        output.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    return name
