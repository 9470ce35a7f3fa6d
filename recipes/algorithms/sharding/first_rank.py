"""The first weights of a model that is divided over ranks: the first rank has the whole, and sends each rank its part.

The other ranks build the model on the meta device, where tensors have shapes and take no memory. They divide it there,
allocate their parts, and receive the weights one after another. Host memory and random numbers for the whole model are
then needed once per run, and not once per device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.algorithms.sharding.shards import own, shard_of
from recipes.training.lever import Lever
from recipes.training.ranks import is_first_rank, on_all_ranks
from recipes.training.run import Run


class FirstRankSends(Lever):
    """Gives all ranks the parameters, buffers and other tensors of the task that the first rank has built.

    It acts after all other levers: those change modules on the meta device, as in dry runs, and divide the model.
    """

    def __init__(self, task: nn.Module) -> None:
        """
        Args:
            task: whole on the first rank, and on the meta device of all others.
        """
        self.task = task
        self.loose: list[tuple[nn.Module, str]] = []
        self.whole: dict[str, Tensor] = {}  # on the first rank, until they are sent

    def change_modules(self, run: Run) -> None:
        """Keep what the model has before it is divided.

        Raises:
            ValueError: on all ranks; see `loose_tensors`.
        """
        self.loose = on_all_ranks(lambda: loose_tensors(self.task))  # the first rank's tensors have values
        if is_first_rank():
            self.whole = {name: tensor.detach() for name, tensor in named_tensors(self.task)}

    def shard(self, run: Run) -> None:
        """Allocate this rank's parts, and receive them. The model has been divided."""
        with run.new_parameters():
            allocate(self.task, self.loose, run.device)
        for name, tensor in named_tensors(self.task):
            receive(tensor, self.whole.pop(name) if is_first_rank() else None, run.device)
        for module, name in self.loose:
            tensor = getattr(module, name)
            receive(tensor, tensor if is_first_rank() else None, run.device)


def named_tensors(task: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, also those that are in no checkpoint, by their names and in the same order on all
    ranks."""
    yield from task.named_parameters()
    yield from task.named_buffers()


def loose_tensors(task: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules and names of attributes that are tensors, but neither parameters nor buffers, such as masks.

    Raises:
        ValueError: a list, tuple or dict of a module holds tensors on the meta device.
    """
    found: list[tuple[nn.Module, str]] = []
    for label, module in task.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found.append((module, name))
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if name not in ("_parameters", "_buffers") and any(_is_without_values(item) for item in inner):
                where = ".".join(part for part in (label, name) if part)
                raise ValueError(
                    f"{type(task).__name__}: {where} holds tensors, which ranks of a divided model receive only as "
                    "parameters, buffers or attributes; register each as a buffer (docs/extending.md)"
                )
    return found


def _is_without_values(item: object) -> bool:
    return isinstance(item, Tensor) and item.is_meta and not isinstance(item, nn.Parameter)


def allocate(task: nn.Module, loose: list[tuple[nn.Module, str]], device: torch.device) -> None:
    """Give all tensors on the meta device memory, without values. Parameters that modules share stay shared.

    Attributes get host memory, as on the first rank, where the model was built: moving a model leaves them there.
    """
    made: dict[tuple[Tensor, torch.device], Tensor] = {}

    def new(tensor: Tensor, device: torch.device) -> Tensor:
        key = tensor, device
        if key not in made:
            empty = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[key] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[key]

    for module in task.modules():
        tensors = {**module._parameters, **module._buffers}  # with all names of one that has several
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                setattr(module, name, new(tensor, device))
    for module, name in loose:
        if getattr(module, name).is_meta:
            setattr(module, name, new(getattr(module, name), torch.device("cpu")))
    task.to(device)  # after which FSDP2 looks at its parameters anew


@torch.no_grad()
def receive(tensor: Tensor, whole: Tensor | None, device: torch.device) -> None:
    """Fill this rank's part of a tensor with the first rank's values. Every rank must call it.

    A rank holds the whole of one tensor at a time. A broadcast needs fewer connections than sending each rank its part,
    and replicas need the same parts.

    Args:
        tensor: a parameter that is divided or not, or any other tensor; of the same shape and dtype on all ranks.
        whole: on the first rank, all of its values; None on the others.
        device: of this rank.
    """
    if not tensor.numel():
        return
    if whole is None:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        sent = whole.to(device).contiguous()
    row = sent.as_strided((sent.numel(),), (1,))  # `view` would keep the stride of a single number, which may be any
    dist.broadcast(row.view(torch.uint8), 0)  # of any dtype
    # On the first rank, what is not divided has its values, and may be a view that repeats them.
    if whole is None or isinstance(tensor, DTensor):
        own(tensor).copy_(shard_of(tensor, sent))
