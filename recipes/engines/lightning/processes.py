"""The processes of a run, whether `composer`, `torchrun`, `python` or a cluster's scheduler started them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from recipes.training.ranks import rank, world_size

TIMEOUT = timedelta(seconds=600)
# What a launcher would set for one process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}


def start_process_group(use_gpu: bool) -> None:
    """Join the process group that the launcher's environment variables describe, or one of this process alone.

    It is joined before Lightning starts, which then takes it as it is: Lightning's own detection differs from launcher
    to launcher, and deletes environment variables that the data set reads.
    """
    if use_gpu:
        torch.cuda.set_device(local_rank())
    if dist.is_initialized():
        return
    backend = "nccl" if use_gpu else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        for name, value in ALONE.items():  # the data set reads them, and so does Composer where a process runs both
            os.environ.setdefault(name, value)
        dist.init_process_group(backend, store=dist.HashStore(), world_size=1, rank=0)


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class StartedProcesses(ClusterEnvironment):
    """Tells Lightning of the process group that exists already, so that it starts no processes.

    It also keeps Lightning from detecting SLURM, under which it would catch signals and write checkpoints unasked.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return world_size()

    def set_world_size(self, size: int) -> None:
        """Nothing: it does not change."""

    def global_rank(self) -> int:
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it does not change."""

    def local_rank(self) -> int:
        return local_rank()

    def node_rank(self) -> int:
        return rank() // local_world_size()
