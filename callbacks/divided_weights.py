"""Weights of a model that is divided over devices, gathered and written piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from data.system.disk_errors import about
from data.system.freed_memory import give_back
from recipes.algorithms.sharding.shards import whole
from recipes.models.task import Task
from recipes.models.tensor_file import TensorFile, in_order
from recipes.training.ranks import by_first_rank, is_first_rank

PIECE = 256 * 2**20  # bytes after which the first rank writes what it has: the ranks wait for each other at each piece


def host_bytes(tensors: Iterable[Tensor]) -> int:
    """The most that the first rank has in host memory while `write_divided` writes tensors, whole or on the meta
    device."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return min(sum(sizes), PIECE + max(sizes, default=0))


@torch.no_grad()
def write_divided(task: Task, new: Path, folder: Path, averaged: bool) -> None:
    """Write the weights of a task that FSDP2 has sharded, and their config. Every rank must call it.

    Tensors are gathered one after another. The first rank writes them as soon as it has `PIECE` bytes; the others wait
    for it in no collective, however slow the disk is.

    Args:
        task: its attribute `exported` is set.
        new: folder to write in.
        folder: its name in errors.
        averaged: whether these are averaged weights beside the others.

    Raises:
        OSError: on the first rank, and ValueError on the others: the disk refuses them.
    """

    def by_first(act: Callable[[], Any]) -> Any:
        def acts() -> Any:
            with about(folder, new):
                return act()

        return by_first_rank(acts)

    path = by_first(lambda: task.export_config(new, averaged))
    tensors = state_of(task, task.exported)
    with ExitStack() as stack:
        files: list[TensorFile] = []  # one, on the first rank

        def begin() -> None:
            files.append(stack.enter_context(TensorFile(path, tensors)))

        def write() -> None:
            for item in held.items():
                files[0].write(*item)

        by_first(begin)
        held: dict[str, Tensor] = {}
        size = 0
        for name in in_order(tensors):
            tensor = tensors[name]
            size += tensor.numel() * tensor.element_size()
            tensor = whole(tensor) if isinstance(tensor, DTensor) else tensor
            if is_first_rank():
                held[name] = tensor.cpu()
            if size >= PIECE:
                by_first(write)
                held, size = {}, 0
                give_back()  # where the next piece does not fit into the gaps, it would come on top
        by_first(write)
        by_first(stack.close)


def state_of(task: nn.Module, part: str) -> dict[str, Tensor]:
    """The state dict of a part of a sharded task, by its names in an undivided one; DTensors where it is sharded."""
    prefix = f"{part}."
    found = get_model_state_dict(task).items()
    return {name.removeprefix(prefix): tensor for name, tensor in found if name.startswith(prefix)}
