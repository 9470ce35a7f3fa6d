"""Tensors of a checkpoint that are read when they are written to another file, so that no process holds all of them.

`torch.save` first pickles the structure of what it is given, and then writes the values of the tensors one after
another. So a conversion can work with stand-ins on the meta device, which have shapes and no values, and each tensor
is read just before it is written. Whatever needs the values of a stand-in raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.engines.checkpoints.checksums import save_full


class Deferred:
    """Makes stand-ins, and writes the tensors for which they stand."""

    def __init__(self) -> None:
        # By the storage of a stand-in: itself, and the function that reads its values.
        self._known: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def stand_in(self, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
        """A contiguous tensor on the meta device.

        Args:
            shape, dtype: of the tensor for which it stands.
            read: returns that tensor, contiguous and on the CPU, with a storage of its own.
        """
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._known[tensor.untyped_storage()._cdata] = tensor, read
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor for which a stand-in stands, which is no view; any other tensor as it is."""
        return self._known[tensor.untyped_storage()._cdata][1]() if tensor.is_meta else tensor

    def to(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor, or a stand-in that is no view, in another format of numbers."""
        if not tensor.is_meta or tensor.dtype == dtype:
            return tensor.to(dtype)
        return self.stand_in(tensor.shape, dtype, lambda: self.read(tensor).to(dtype))

    def save(self, values: Any, file: Path) -> None:
        """Write the file that `save_full` would write if `values` held tensors in the place of stand-ins.

        One tensor is in memory at a time, and what its function takes to read it.

        Args:
            values: dicts, lists and tuples with stand-ins, which may be views, and with any other values.
            file: to write.

        Raises:
            OSError, ValueError: a tensor cannot be read, or the file cannot be written.
        """
        # By the storage of a stand-in: memory that takes its place when it is pickled. Nobody touches it, so that the
        # system never gives it.
        memories: dict[int, Tensor] = {}
        reads: dict[int, Callable[[], Tensor]] = {}  # by the storages of these, as long as they have not been written
        views: dict[int, Tensor] = {}  # by the id of a stand-in: one that has two places is pickled once

        def given(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in memories:
                whole, read = self._known[key]
                memories[key] = torch.empty(whole.shape, dtype=whole.dtype)
                reads[memories[key].untyped_storage()._cdata] = read
            view = memories[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            return views.setdefault(id(tensor), view)

        class Writer(torch._C.PyTorchFileWriter):
            """PyTorch's writer of zip files, which reads the values of a storage when it is its turn."""

            def write_record(self, name: str, data: Any, size: int) -> None:
                read = reads.pop(data._cdata, None) if torch.is_storage(data) else None
                if read is not None:
                    data = read().untyped_storage()
                    assert data.nbytes() == size, f"{data.nbytes()} bytes instead of {size}"
                super().write_record(name, data, size)

        values = replaced(values, given)
        theirs = torch._C.PyTorchFileWriter
        torch._C.PyTorchFileWriter = Writer
        try:
            save_full(values, file)
        finally:
            torch._C.PyTorchFileWriter = theirs
        assert not reads, f"{len(reads)} tensors have not been written; this version of PyTorch writes in another way"


def replaced(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """A value of dicts, lists and tuples with other tensors in the place of those on the meta device.

    What holds none of them stays the same object, so that `torch.save` goes on writing it once where it has two places.
    """
    if isinstance(value, Tensor) and value.is_meta:
        return new(value)
    if type(value) is dict:
        found = {key: replaced(part, new) for key, part in value.items()}
        return value if all(found[key] is part for key, part in value.items()) else found
    if type(value) in (list, tuple):
        parts = [replaced(part, new) for part in value]
        return value if all(map(lambda a, b: a is b, parts, value)) else type(value)(parts)
    return value
