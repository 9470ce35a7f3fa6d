"""Files of `torch.save` that nobody should trust, with checks that `torch.load(weights_only=True)` lacks.

PyTorch before 2.10 believes a file that claims a larger storage than it holds, and assigns into whatever is on the
pickle's stack: such a file reads and writes memory of the process, and can so run code. NumPy believes a dtype whose
fields lie outside of its values. A pickle of a few hundred bytes may stand for more values than any memory holds.
Inside of `checked` PyTorch refuses all of these.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, _weights_only_unpickler

from data.system.memory import memory_to_read

# The functions that build the tensors of state dicts: dense ones in memory, also of dtypes such as float8 and uint16.
DENSE = {f"_rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")}

# The operations of pickles that PyTorch reads.
OPERATIONS = {value[0] for value in vars(_weights_only_unpickler).values() if isinstance(value, bytes) and value}
SPARE = 1 << 24  # bytes that repeated numbers, of which a file holds one, may have
MAX_VALUES = 10_000_000  # of a file, besides the numbers in tensors; 8 letters count as one


def load(file: str | Path | BinaryIO, allowed: Iterable[Any] = (), *, lazily: bool = False) -> Any:
    """The contents of a file of torch.save, on the CPU. It calls nothing that the file names but PyTorch's own
    constructors of tensors and `allowed`.

    Args:
        file: path, or open file.
        allowed: types that the file may hold, besides tensors and plain values.
        lazily: leave tensors on disk until they are used.

    Raises:
        FileNotFoundError: there is no such file.
        NotEnoughMemory: the file may be whole.
        Exception: on damaged bytes, PyTorch's reader raises nearly anything.
    """
    if isinstance(file, str | Path):
        name, size = file, os.path.getsize(file)
    else:
        start, name, size = file.tell(), getattr(file, "name", "a value"), file.seek(0, os.SEEK_END)
        file.seek(start)
    with memory_to_read(name, size), checked(), torch.serialization.safe_globals(list(allowed)):
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=lazily or None)
    if _bytes(found) > 2 * size + SPARE:  # tensors may share memory, as those that are tied do
        raise ValueError("its tensors are larger than the file")
    return found


def _bytes(value: Any) -> int:
    """Of all tensors and arrays in a value, if each had memory of its own."""
    total, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, Tensor | np.ndarray):
            total += part.nbytes
        elif isinstance(part, dict | list | tuple):
            left.extend(part.values() if isinstance(part, dict) else part)
    return total


@contextmanager
def checked() -> Iterator[None]:
    """A context in which torch.load(weights_only=True) makes the checks of this file. It is not for several threads."""
    theirs = torch._C.PyTorchFileReader, _weights_only_unpickler.Unpickler
    if theirs[1] is Unpickler:
        yield
        return
    torch._C.PyTorchFileReader, _weights_only_unpickler.Unpickler = Reader, Unpickler
    try:
        yield
    finally:
        torch._C.PyTorchFileReader, _weights_only_unpickler.Unpickler = theirs


class Reader(torch._C.PyTorchFileReader):
    """PyTorch's reader of zip files. A storage has the bytes of its record, which lies where the file says in two
    places, and no record is compressed. Else it raises a RuntimeError, as PyTorch's does for other damages."""

    def __init__(self, file: BinaryIO) -> None:
        if not isinstance(file, io.BytesIO | io.BufferedReader):  # PyTorch's views of files cannot seek from their end
            file.seek(0, os.SEEK_END)
            file = part_of(file, 0, file.tell())
        start = file.tell()
        with zipfile.ZipFile(file) as records:  # torch.save stores them as they are; zeros would shrink to a thousandth
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
                raise RuntimeError("its records are compressed, which torch.save does not do")
            # PyTorch's names of records have no folder, which all records of a file share.
            named = {record.filename.partition("/")[2]: record for record in records.infolist()}
            self._sizes = {name: record.file_size for name, record in named.items()}
            # What comes after a record's bytes: its sizes where a flag says so, else the next record or the directory.
            self._ends = {name: b"PK\7\x08" if record.flag_bits & 8 else b"PK" for name, record in named.items()}
        file.seek(start)
        super().__init__(file)
        self._file, self._start = file, start

    def get_record_offset(self, name: str) -> int:
        """Where the bytes of a record begin, if they end where it says. PyTorch would read other bytes where a bit of
        the numbers has changed that say so."""
        offset, end = super().get_record_offset(name), self._ends[name]
        self._file.seek(self._start + offset + self._sizes[name])
        if self._file.read(len(end)) != end:
            raise RuntimeError(f"{name} does not lie where its header says")
        return offset

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> Tensor:
        """Read a record, whose length PyTorch 2.7 does not compare with the `size` in bytes that the pickle claims.

        It is read to where it stays. PyTorch's reader would copy it twice, to memory that the system gives anew.
        """
        if self._sizes.get(name) != size:
            raise RuntimeError(f"it claims {size:,} bytes in {name}, which has {self._sizes.get(name, 0):,}")
        found = torch.empty(size, dtype=torch.uint8)
        self._file.seek(self._start + self.get_record_offset(name))
        count = self._file.readinto(found.numpy())
        if count != size:
            raise RuntimeError(f"{name} ends after {count:,} of {size:,} bytes")
        return found


class _Part(io.RawIOBase):
    """Bytes of an open file as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._at)])
        self._at += count
        return count


def part_of(file: BinaryIO, start: int, size: int) -> io.BufferedReader:
    """`size` bytes of an open file from `start` on as a file of their own, which is read while the other is open."""
    return io.BufferedReader(_Part(file, start, size))


class Unpickler(_weights_only_unpickler.Unpickler):
    """PyTorch's, for pickles that `Trial` has read without an error."""

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file

    def load(self) -> Any:
        """What is pickled at the present place of the file."""
        start = self._file.tell()
        Trial(self._file).load()
        self._file.seek(start)
        return super().load()


class Trial(pickle._Unpickler):
    """Reads a pickle as the other one does, but with `Inert` in the place of dicts and of all that it names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._values = 0.0

    def load(self) -> None:
        """
        Raises:
            pickle.UnpicklingError: the pickle is not to be read.
        """
        found = super().load()
        self._count([found, self.stack, self.metastack])  # what is left over takes memory, too

    def load_global(self) -> None:
        self.append(self.find_class(*_weights_only_unpickler._read_global_instruction(self.readline)))

    def find_class(self, module: str, name: str) -> Any:
        module, _, name = f"{module}.{name}".rpartition(".")  # PyTorch looks up both as one, divided at any dot
        # PyTorch lets quantised tensors, whose types alone begin with a Q, be larger than their storage. A function of
        # torch._tensor sets the state of whatever it is told to make, such as a dtype of NumPy.
        refused = name not in DENSE if module == "torch._utils" else module == "torch" and name[:1] in "qQ"
        if refused or module == "torch._tensor":
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return STAND_INS.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Any:
        return Inert()

    def load_empty_dictionary(self) -> None:
        self.append(Dict())

    def load_reduce(self) -> None:
        self._count(self.stack[-1])  # before it is called, as it may go through what it is given
        super().load_reduce()

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # else one file could change the classes below for the next
            raise pickle.UnpicklingError("it changes a type")
        super().load_build()

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it holds an operation that torch.save does not write")

    dispatch = {
        **dict.fromkeys(range(256), refuse),  # some take memory for what they claim, or hash what is in them
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code in OPERATIONS},
        pickle.BUILD[0]: load_build,
        pickle.EMPTY_DICT[0]: load_empty_dictionary,
        pickle.GLOBAL[0]: load_global,
        pickle.REDUCE[0]: load_reduce,
    }

    def _count(self, value: Any) -> None:
        """Count the values that a value stands for. Parts of it may be in many places, so that a file of a few hundred
        bytes could take all time and memory of whoever goes through it.

        Raises:
            pickle.UnpicklingError: they are more than `MAX_VALUES`.
        """
        sizes: dict[int, float] = {}

        def size(value: Any) -> float:
            if isinstance(value, str | bytes):
                return 1 + len(value) // 8
            if not isinstance(value, list | tuple | Inert):
                return 1
            if id(value) not in sizes:
                sizes[id(value)] = math.inf  # while its own parts are counted
                sizes[id(value)] = 1 + sum(map(size, value.parts if isinstance(value, Inert) else value))
            return sizes[id(value)]

        self._values += size(value)
        if self._values > MAX_VALUES:
            raise pickle.UnpicklingError(f"it stands for more than {MAX_VALUES:,} values")


class Inert:
    """In the place of a type, of what it constructs, or of a function.

    Attributes:
        parts: what it was given.
    """

    def __new__(cls, *args: Any) -> Inert:
        found = super().__new__(cls)
        found.parts = list(args)
        return found

    def __init__(self, *args: Any) -> None:
        """Takes everything."""

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise pickle.UnpicklingError("it assigns into a tensor or an array")


class Dict(Inert):
    """In the place of a dict of any type. Keys are not hashed, which may take as long as to go through them."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)


class Bytes(Inert):
    """In the place of what makes bytes of a text, or of bytes. Given a number, it would make as many of zeros."""

    def __init__(self, text: str | Bytes = "", encoding: str = "latin1") -> None:
        if not isinstance(text, str | Bytes) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("it makes bytes in another way than torch.save")


class Dtype(Inert):
    """In the place of a type of NumPy."""

    def __setstate__(self, state: Any) -> None:
        version, order, subtype, names, fields, *rest = state
        if (subtype, names, fields) != (None, None, None):
            raise pickle.UnpicklingError("it holds a structured dtype of NumPy")


STAND_INS = {
    ("_codecs", "encode"): Bytes,
    ("builtins", "bytearray"): Bytes,
    ("collections", "Counter"): Dict,
    ("collections", "OrderedDict"): Dict,
    ("numpy", "dtype"): Dtype,
}
