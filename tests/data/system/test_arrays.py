"""Arrays of NumPy: what is said of files that are damaged, and of those that the disk does not give."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest

from data.system.arrays import damage_named, read_matrix


def test_matrices_are_read_and_their_damage_is_named(tmp_path):
    file = tmp_path / "matrix.npy"
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(file, matrix)
    for shape in (None, (2, 3)):
        assert np.array_equal(read_matrix(file, shape), matrix)
    with pytest.raises(ValueError, match=rf"^{file}: .*expected 3 x 2 numbers\); copy it again$"):
        read_matrix(file, (3, 2))
    with pytest.raises(FileNotFoundError):
        read_matrix(tmp_path / "none.npy")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_an_error_of_the_disk_is_no_damage(tmp_path, number, monkeypatch):
    def refused(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(np, "load", refused)
    Path(tmp_path / "matrix.npy").touch()
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        read_matrix(tmp_path / "matrix.npy")
    assert error.value.filename == str(tmp_path / "matrix.npy")


class Lost(io.BytesIO):
    """The contents of a file on a mount that is lost after its first bytes were read."""

    def read(self, *arguments):
        if self.tell() > 8:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().read(*arguments)


def test_an_archive_that_the_disk_does_not_give(tmp_path):
    """zipfile hides what the disk says behind an error of its own."""
    file, data = tmp_path / "part.npz", io.BytesIO()
    np.savez(data, a=np.zeros(3))
    file.write_bytes(data.getvalue())
    with pytest.raises(OSError, match="Stale file handle") as error, damage_named(file, "delete it"):
        np.load(Lost(data.getvalue()))
    assert error.value.filename == str(file)
    with pytest.raises(ValueError, match="damaged .*; delete it"), damage_named(file, "delete it"):
        np.load(io.BytesIO(data.getvalue()[:-30]))
