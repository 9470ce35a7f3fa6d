"""Arrays of NumPy: what is said of files that are damaged, and of those that the disk does not give."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from data.system.arrays import read_matrix


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
