"""A safetensors file that is written one tensor after another, by a process that never holds all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

# What safetensors calls each format of numbers, in the order in which it writes tensors.
FORMATS = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors, in the order in which a file has their values.

    Raises:
        ValueError: safetensors has no name for a tensor's format of numbers.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FORMATS:
            raise ValueError(f"{name} is of {tensor.dtype}, which no safetensors file can hold; use another dtype")
    order = list(FORMATS)
    return sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))


class TensorFile:
    """The bytes are those that `safetensors.torch.save_file` writes of the same tensors.

    Example::

        with TensorFile(path, network.state_dict()) as file:
            for name in file.names:
                file.write(name, values_of(name))

    Attributes:
        names: of all tensors, in the order in which they must be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the header.

        Args:
            path: of the file, which is replaced.
            tensors: by name. Only shapes and dtypes are read: they may be DTensors, or on the meta device.

        Raises:
            OSError: the file cannot be written.
            ValueError: see `in_order`.
        """
        self.names = in_order(tensors)
        self._left = {name: (tensors[name].shape, tensors[name].dtype) for name in self.names}
        header, end = {}, 0
        for name in self.names:
            begin, end = end, end + tensors[name].numel() * tensors[name].dtype.itemsize
            kind, shape = FORMATS[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
        self._file = path.open("wb", buffering=0)
        try:
            self._write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of the next tensor.

        Args:
            name: the next one of `names`.
            tensor: whole, in host memory, with the shape and dtype of which the header was written.

        Raises:
            OSError: they cannot be written.
        """
        following = next(iter(self._left))
        found = name, tensor.shape, tensor.dtype
        assert found == (following, *self._left.pop(following)), f"{found}, but {following} is next"
        if tensor.numel():
            # `view` would keep the stride of a single number, which may be any in a contiguous tensor.
            row = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
            self._write(row.view(torch.uint8).numpy())

    def _write(self, data: bytes) -> None:
        """The system may take only a part at a time; of a full disk it says so at the next one."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        assert error is not None or not self._left, f"{len(self._left)} tensors have not been written"
