"""Sharded checkpoints, as torch.distributed.checkpoint writes them, read by one process and without its unpickling.

A folder holds one file per rank with the ranks' parts, and `.metadata`, a pickle that says where each part lies.
PyTorch's own loader unpickles it, and values that are no tensors, without restriction. Here both may only name the few
types that such files need; nothing else is imported or called.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.system.disk_errors import about
from recipes.engines.checkpoints.batch_marks import check_one_batch
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.checkpoints.plain_pickles import damaged, plain_metadata
from recipes.models import torch_files

METADATA = ".metadata"


@dataclass(frozen=True)
class Sharded:
    """An opened sharded checkpoint, whose values are read when they are asked for.

    Attributes:
        folder: of the checkpoint.
        metadata: what `.metadata` holds.
    """

    folder: Path
    metadata: Any

    @classmethod
    def open(cls, folder: Path) -> Sharded:
        """
        Raises:
            ValueError: the folder is not a sharded checkpoint, its files are of different batches, or its metadata has
                other types than PyTorch's.
        """
        file = folder / METADATA
        if not file.is_file():
            raise ValueError(f"{folder}: not a sharded checkpoint; it has no file {METADATA}")
        metadata = plain_metadata(file)
        check_one_batch(folder, metadata)
        return cls(folder, metadata)

    def values(
        self,
        wanted: Callable[[str], bool] = lambda name: True,
        allowed: Iterable[Any] = (),
        deferred: Deferred | None = None,
        defers: Callable[[str], bool] = lambda name: True,
    ) -> dict[str, Any]:
        """Tensors, put together, and other values, by their flat names such as `weights.layer.bias`.

        Args:
            wanted: whether the value of a name is read.
            allowed: types that values which are no tensors may hold, besides plain ones.
            deferred: makes stand-ins for tensors, which it reads when it writes them; None: tensors are read now.
            defers: whether the tensor of a name gets a stand-in, if `deferred` is given.

        Raises:
            ValueError: a part is missing or damaged, or a value holds another type.
        """
        places = defaultdict(list)
        found = {}
        with damaged(f"{self.folder}: damaged"), torch.serialization.safe_globals(list(allowed)):
            for index, info in self.metadata.storage_data.items():
                places[index.fqn].append((index.offset, info))
            for name, kind in self.metadata.state_dict_metadata.items():
                if not wanted(name):
                    continue
                if not hasattr(kind, "chunks"):
                    found[name] = self._load(places[name][0][1])
                elif deferred is not None and defers(name):
                    self._check_size(name, kind)
                    read = partial(self._read, name, kind, places[name])
                    found[name] = deferred.stand_in(kind.size, kind.properties.dtype, read)
                else:
                    found[name] = self._tensor(name, kind, places[name])
        return found

    def nested(
        self,
        allowed: Iterable[Any] = (),
        deferred: Deferred | None = None,
        defers: Callable[[str], bool] = lambda name: True,
    ) -> dict[str, Any]:
        """All values as they were nested when they were saved. Arguments and errors as of `values`."""
        root: dict[Any, Any] = {}
        values = self.values(allowed=allowed, deferred=deferred, defers=defers)
        with damaged(f"{self.folder / METADATA}: damaged"):
            for name, value in values.items():
                path = self.metadata.planner_data[name]
                if any(isinstance(key, int) and not 0 <= key <= len(values) for key in path):
                    raise ValueError(f"no list has the places of {name}")
                at = root
                for key, following in zip(path, path[1:], strict=False):
                    at = _step(at, key, [] if isinstance(following, int) else {})
                _step(at, path[-1], value)
        return root

    def _read(self, name: str, kind: Any, places: list[tuple[Any, Any]]) -> Tensor:
        """As `_tensor`, at a later time."""
        with about(self.folder), damaged(f"{self.folder}: damaged"):  # not about the file that is being written
            return self._tensor(name, kind, places)

    def _tensor(self, name: str, kind: Any, places: list[tuple[Any, Any]]) -> Tensor:
        self._check_size(name, kind)
        tensor = torch.empty(kind.size, dtype=kind.properties.dtype)
        filled = 0
        for offsets, info in places:
            part = self._load(info)
            view = tensor
            for dimension, offset in enumerate(offsets or ()):
                view = view.narrow(dimension, offset, part.shape[dimension])
            view.copy_(part)
            filled += part.numel()
        if filled != tensor.numel():
            raise ValueError(f"{self.folder}: {name} is not complete; the checkpoint lacks a rank's part")
        return tensor

    def _check_size(self, name: str, kind: Any) -> None:
        if math.prod(kind.size) * kind.properties.dtype.itemsize > self._bytes:
            raise ValueError(f"{self.folder}: {name} is not complete; it is larger than all files together")

    @cached_property
    def _bytes(self) -> int:
        """Of all files together: with one of each of 1,024 ranks, a file system must not be asked for each tensor."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def _load(self, info: Any) -> Any:
        """One part: bytes of a file, as `torch.save` wrote them."""
        file = self.folder / Path(info.relative_path).name
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{file}: compressed, which is not supported")
        if not file.is_file():
            raise ValueError(f"{file}: missing; copy the whole folder of the checkpoint")
        with file.open("rb") as stream, damaged(f"{file}: not readable as a part of a checkpoint"):
            length = min(info.length, file.stat().st_size - info.offset)  # what is claimed says nothing of memory
            return torch_files.load(torch_files.part_of(stream, info.offset, length))


def _step(at: Any, key: Any, value: Any) -> Any:
    """Set a key of a dict, or a place of a list, where there is none yet; return what is there."""
    if isinstance(key, int):
        at.extend([None] * (key + 1 - len(at)))
        at[key] = value if at[key] is None else at[key]
        return at[key]
    return at.setdefault(key, value)
