"""The processes of a run, whether `composer`, `torchrun`, `python` or a cluster's scheduler started them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from recipes.engines.meeting import LIMIT, meeting

TIMEOUT = timedelta(seconds=LIMIT)
# What a launcher would set for the one process of a machine, and for the one of a run.
OF_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", **OF_MACHINE}


def start_process_group(use_gpu: bool) -> None:
    """Join the process group that the launcher's environment variables describe, or one of this process alone.

    It is joined before Lightning starts, which then takes it as it is: Lightning's own detection differs from launcher
    to launcher, and deletes environment variables that the data set reads. Where it detects SLURM, it would catch
    signals and write checkpoints unasked.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    # The data set and Lightning read them, and so does Composer where a process runs both.
    for name, value in (ALONE if alone else OF_MACHINE).items():
        os.environ.setdefault(name, value)
    if use_gpu:
        torch.cuda.set_device(local_rank())
    if dist.is_initialized():
        return
    backend = "nccl" if use_gpu else "gloo"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), world_size=1, rank=0)
    else:
        with meeting():
            dist.init_process_group(backend, timeout=TIMEOUT)


def local_rank() -> int:
    """This process's number on its machine, once `start_process_group` was called."""
    return int(os.environ["LOCAL_RANK"])


def local_world_size() -> int:
    """Number of processes on this machine, once `start_process_group` was called."""
    return int(os.environ["LOCAL_WORLD_SIZE"])
