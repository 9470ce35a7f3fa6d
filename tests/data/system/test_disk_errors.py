"""What users can mend is told from bugs, whoever reports it."""

import errno
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from data.system.disk_errors import about, disk_error, disk_line
from recipes.engines.checkpoints.plain_pickles import damaged
from tests.disks import small_files

FULL = OSError(errno.ENOSPC, "No space left on device")


def raised(act):
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.ESTALE, "Stale file handle"),  # of a write, or of a file that is brought to the disk
        OSError(errno.ENOTCONN, "Transport endpoint is not connected", "a"),  # of a mount that is lost
        TimeoutError(errno.ETIMEDOUT, "Connection timed out", "a"),
        OSError(errno.EROFS, "Read-only file system", "a"),
        PermissionError(errno.EACCES, "Permission denied", "a"),
        OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300),
        FileExistsError(errno.EEXIST, "File exists", __file__),
        CheckpointException("write", {1: _wrap_exception(FULL)}),
        shutil.Error([("a", "b", "[Errno 28] No space left on device")]),
        OSError("4096 requested and 0 written"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_disks_are_one_line_with_advice(error):
    line = disk_line(disk_error(error))
    assert re.fullmatch(r"(a+: |/.*: )?[^;\n]+; [^;\n]+, and start the same command again", line)


@pytest.mark.parametrize(
    ("reason", "number"),
    [
        ("Read-only file system", errno.EROFS),
        ("No space left on device", errno.ENOSPC),
        ("Is a directory", errno.EISDIR),
    ],
)
def test_torch_2_11_says_why_it_cannot_write(reason, number):
    error = RuntimeError(f"[enforce fail at inline_container.cc:747] . open file failed with strerror: {reason}")
    found = disk_error(error)
    assert (found.errno, found.strerror) == (number, reason)


@pytest.mark.parametrize(
    "said", ["open file </run/a.pt> in read-only mode", "mmap 903555 bytes from file </run/a.pt>"]
)
def test_a_checkpoint_that_pytorch_cannot_open_is_not_damaged(said):
    """It opens the file itself, to map it into memory. Its user would remove the checkpoint."""
    error = RuntimeError(f"unable to {said}: Stale file handle (116)")
    assert disk_line(disk_error(error)).startswith("/run/a.pt: Stale file handle; look at the disk and its mount")
    with pytest.raises(RuntimeError) as same, damaged("/run/a.pt: damaged"):
        raise error
    assert same.value is error


def test_a_copy_lacks_room_where_it_is_written(tmp_path):
    """Not where the file is that it reads, which Python names first: an export copies encoders from other disks."""
    (tmp_path / "read").write_bytes(bytes(5000))
    with small_files(1000):
        error = raised(lambda: shutil.copyfile(tmp_path / "read", tmp_path / "written"))
    assert disk_line(disk_error(error)).startswith(f"{tmp_path}/written: File too large; ")


def test_a_file_that_cannot_get_its_name_is_told_by_it(tmp_path):
    """Not by its temporary name, nor by that of the folder that it is in, where nothing is left of either."""
    folder, partial = tmp_path / "export", tmp_path / ".export.1"
    inner, hidden = partial / "a", partial / ".a.1"
    with pytest.raises(OSError, match="export'$") as error, about(folder, partial), about(inner, hidden):
        raise OSError(errno.ENOSPC, "No space left on device", str(hidden), None, str(inner))
    assert disk_line(disk_error(error.value)).startswith(f"{folder}: No space left on device; ")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EPERM, "Operation not permitted"),  # of a signal, say: it names no file
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),  # of a socket
        OSError(errno.EBADF, "Bad file descriptor", "a"),
        OSError("image file is truncated"),
        FileExistsError(errno.EEXIST, "File exists", str(Path(__file__).parent)),
        CheckpointException("write", {0: _wrap_exception(KeyError("a bug"))}),
        RuntimeError("a bug: [Errno 28]"),
        RuntimeError("[enforce fail at inline_container.cc:1] . PytorchStreamReader failed"),
    ],
    ids=str,
)
def test_other_errors_keep_their_tracebacks(error):
    assert disk_error(error) is None
    with pytest.raises(type(error)) as same, about("x"):
        raise error
    assert same.value is error


def test_libraries_that_meet_a_full_disk_are_understood(tmp_path):
    """By their own messages, in this version."""
    tensor, file = torch.zeros(9000), tmp_path / "file"
    with small_files(4096):
        errors = [
            raised(lambda: np.save(file.open("wb"), tensor.numpy())),
            raised(lambda: torch.save(tensor, file)),
            raised(lambda: torch.save(tensor, io.FileIO(file, "w"))),
            raised(lambda: save_file({"a": tensor}, file)),
            raised(lambda: file.write_bytes(bytes(9000))),
        ]
    for error in errors:
        with pytest.raises(OSError, match=r"(?s)'named'$") as found, about("named", file):
            raise error
        assert "named: " in disk_line(disk_error(found.value))
