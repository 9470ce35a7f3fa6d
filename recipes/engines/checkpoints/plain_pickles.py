"""Checkpoints without code: what PyTorch and Composer would unpickle is read with the few types that it needs.

PyTorch's loader of sharded checkpoints unpickles the file `.metadata` and every value that is no tensor, and Composer
unpickles full checkpoints. A pickle calls whatever it names. Inside of `plain_pickles` each is first read with a list
of allowed types, which raises at anything else before it is called.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as file_format
from torch.distributed.checkpoint import metadata as metadata_format
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

from data.system.disk_errors import disk_error
from data.system.errors import first_line, one_line
from data.system.memory import NotEnoughMemory, memory_to_read
from recipes.engines.checkpoints.legacy import check_names
from recipes.models import torch_files

ALLOWED = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    np.empty(0).__reduce__()[0],  # what rebuilds arrays; its module has another name in each version of NumPy
    timedelta,
    TorchVersion,
]
# What a file `.metadata` names besides the classes of torch.distributed.checkpoint.metadata.
IN_METADATA = {
    (file_format.__name__, "_StorageInfo"),
    (file_format.__name__, "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
}
VALUES_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class DamagedCheckpoint(ValueError):
    """The bytes of a checkpoint are not what was written, or not what this repository writes.

    `recipes.engines.resuming` says what to do.
    """


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """A context for reading a checkpoint, in which all that damaged bytes or missing values raise, which is nearly
    anything, becomes a DamagedCheckpoint of one line.

    Args:
        what: path, colon, and what is wrong. A ValueError that begins with the path stays as it is.

    Raises:
        OSError, NotEnoughMemory: of the system, such as of missing rights or of a file server; the checkpoint may be
            whole.
    """
    try:
        yield
    except Exception as error:
        if _of_system(error):
            raise
        if isinstance(error, ValueError) and str(error).startswith(what.split(":")[0]):
            raise  # it says where, already
        raise DamagedCheckpoint(f"{what}: {one_line(error)}") from error


def _of_system(error: BaseException) -> bool:
    """Whether an error says nothing of the bytes of a file. Damaged ones make readers seek to where no file can have
    bytes, and libraries raise OSErrors without a number for them."""
    of_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
    of_system |= str(error).startswith("unable to ") and disk_error(error) is not None  # PyTorch's own words
    return of_system or isinstance(error, FileNotFoundError | NotEnoughMemory)


NOT_WHOLE = "not a whole checkpoint of a run"


def load_plain(file: str | Path | BinaryIO, where: str | Path = "", *, lazily: bool = False) -> Any:
    """The contents of a file of torch.save, on the CPU.

    Args:
        file: path, or open file.
        where: its name in errors; the path if it is empty.
        lazily: leave tensors on disk until they are used.

    Raises:
        FileNotFoundError: there is no such file.
        OSError, NotEnoughMemory: it cannot be read now.
        ValueError: it is damaged, or holds other types than this repository's runs write.
    """
    try:
        found = torch_files.load(file, ALLOWED, lazily=lazily)
        if isinstance(file, str | Path | io.BytesIO):
            _check_pickle(file)
        return found
    except Exception as error:  # on damaged bytes, PyTorch's reader raises nearly anything
        for found in (error, error.__context__):  # zipfile hides what the disk says behind an error of its own
            if found is not None and _of_system(found):
                if isinstance(found, OSError) and found.filename is None:
                    found.filename = str(where or file)
                raise found from None
        what = f"{where or file}: not a checkpoint that this repository wrote"
        raise DamagedCheckpoint(f"{what}: {_reason(file, error)}") from error


def loadable(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a lever or callback, if `load_plain` will read a checkpoint with it.

    Args:
        name: of the lever or callback.
        state: what its `state_dict` returned.

    Raises:
        ValueError: it is no dict, or holds other values, such as those of a class; no run could go on from the
            checkpoint.
    """
    if not isinstance(state, Mapping):
        what = f"an instance of {type(state).__name__}"
        raise ValueError(f"{name}: state_dict returns {what}; return a dict, which may be empty")
    for key, value in state.items():
        file = io.BytesIO()
        try:
            torch.save(_without_numbers(value), file)
            file.seek(0)
            torch_files.load(file, ALLOWED)
        except Exception as error:  # pickling raises nearly anything
            raise ValueError(
                f"{name}: state_dict returns {key!r} with a value that is not loaded from checkpoints "
                f"({_reason(file, error)}); return tensors, numbers, texts, and lists and dicts of them"
            ) from error
    return state


def _without_numbers(value: Any) -> Any:
    """A value without its tensors, and without the numbers of its arrays, which may be many."""
    if isinstance(value, torch.Tensor):
        return None
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.zeros(min(1, value.size), value.dtype)  # no bytes at all are pickled in another way
    if type(value) in (dict, OrderedDict):  # the latter of modules' state_dict
        return {key: _without_numbers(item) for key, item in value.items()}
    return type(value)(map(_without_numbers, value)) if type(value) in (list, tuple) else value


def _check_pickle(file: str | Path | io.BytesIO) -> None:
    """Compare what is no tensor with its checksum, which PyTorch writes and does not read: a changed bit may lie in a
    name. Tensors would take long.

    Raises:
        zipfile.BadZipFile: the checksum is another one.
    """
    with zipfile.ZipFile(file) as records:
        for name in records.namelist():
            if name.endswith("/data.pkl"):
                with records.open(name) as content:
                    while content.read(2**20):
                        pass


def _reason(file: str | Path | BinaryIO, error: Exception) -> str:
    """Why a file was refused, without PyTorch's advice to read it unsafely, which hides the reason."""
    if isinstance(file, str | Path) and os.path.isfile(file) and not zipfile.is_zipfile(file):
        return "it is cut off, or no file of torch.save"
    pattern = r"(?:WeightsUnpickler error|Trying to load):?\s+(.*?)(\. Please .*|\.)?$"
    refused = re.search(pattern, str(error), re.MULTILINE)
    return refused[1] if refused else first_line(error)


class MetadataUnpickler(pickle._Unpickler):
    """Reads the file `.metadata`. It refuses all types but `IN_METADATA`, `VALUES_OF_TORCH` and those of the format.

    It is Python's own implementation, because the faster one in C takes up to 64 GiB for a file of 7 bytes that claims
    a large index of its memo, and because it can be told what must not be changed.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata_format.__name__:
            found = getattr(metadata_format, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if (module, name) in IN_METADATA:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), VALUES_OF_TORCH):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def load_build(self) -> None:
        changed = self.stack[-2]
        if type(changed).__module__ not in (metadata_format.__name__, file_format.__name__):  # such as a type itself
            raise pickle.UnpicklingError(f"it changes a {type(changed).__name__}")
        super().load_build()

    def load_bytearray8(self) -> None:
        raise pickle.UnpicklingError("it holds a bytearray")  # for which memory is taken before its bytes are read

    dispatch = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def plain_metadata(path: Path) -> metadata_format.Metadata:
    """What `.metadata` of a sharded checkpoint holds.

    Raises:
        FileNotFoundError: there is no such file.
        OSError, NotEnoughMemory: it cannot be read now.
        ValueError: it is damaged, holds more than plain values, or names files outside of its folder.
    """
    try:
        with open(path, "rb") as file, memory_to_read(path, path.stat().st_size):
            found = MetadataUnpickler(file).load()
        if not isinstance(found, metadata_format.Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        # Composer also writes the files of a bucket's checkpoint to where this says.
        for name in {info.relative_path for info in found.storage_data.values()}:
            if name in ("", ".", "..") or "/" in name:
                raise ValueError(f"it names the file {name!r}, which is not in its folder")
        return found
    except Exception as error:  # unpickling damaged bytes raises nearly anything
        if _of_system(error):
            raise
        what = f"{path}: not of a checkpoint that this repository wrote"
        raise DamagedCheckpoint(f"{what}: {first_line(error)}") from error


@contextmanager
def plain_pickles() -> Iterator[None]:
    """A context in which sharded checkpoints and full ones of Composer are refused if they hold anything but plain
    values, and sharded ones also if they hold parameters by the names of an earlier version.

    Raises:
        ValueError: from whatever loads such a checkpoint.
    """
    theirs = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    refused: list[Exception] = []
    known: dict[Path, metadata_format.Metadata] = {}  # engines ask up to three times, and of 1,024 ranks it is large

    # In the place of PyTorch's, which unpickles without restriction. By the further arguments that torch 2.11's has, it
    # would ask for another file.
    def read_metadata(self: FileSystemReader) -> Any:
        path = Path(self.path, ".metadata")
        try:
            if path not in known:
                found = plain_metadata(path)
                check_names(path.parent, found.state_dict_metadata)
                known[path] = found
            metadata = known[path]
            metadata.storage_meta = metadata.storage_meta or metadata_format.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # torch 2.11 goes on and says only that there is no metadata
            refused.append(error)
            raise
        return metadata

    def load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        load_plain(value, f"{read_item.dest_index.fqn} of a sharded checkpoint")
        value.seek(0)
        theirs[1](self, read_item, value)

    FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = read_metadata, load_bytes
    try:
        with torch_files.checked():
            yield
    except CheckpointException as error:  # what the loader makes of any error, with the tracebacks of all ranks
        where = next((str(path.parent) for path in known), "a sharded checkpoint")
        for cause in refused or [cause for cause, *_ in error.failures.values()]:
            if isinstance(cause, FileNotFoundError) and cause.filename is not None:
                missing = f"{cause.filename}: missing; copy the whole folder of the checkpoint"
                raise FileNotFoundError(missing) from error
            of_user = isinstance(cause, ValueError | FileNotFoundError | NotEnoughMemory)
            if of_user and not isinstance(cause, UnicodeError):
                raise type(cause)(str(cause)) from error
            if _of_system(cause):
                raise cause from error  # the loader's is no Exception, and would not be made one line
            reason = first_line(cause)
            if "Missing key" in reason:
                raise ValueError(f"{where}: not of this model ({reason})") from error
            if error.args[0] in ("read", "plan") and isinstance(cause, Exception):  # damaged bytes raise anything
                raise DamagedCheckpoint(f"{where}: a part of it is damaged ({reason})") from error
        raise
    finally:
        FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = theirs
