"""Arrays of NumPy in files that nobody should trust."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data.system.disk_errors import ADVICE
from data.system.errors import one_line
from data.system.memory import NotEnoughMemory, memory_to_read


@contextmanager
def damage_named(file: Path, advice: str, what: str = "damaged") -> Iterator[None]:
    """A context in which a file of NumPy is read, whose damage is one line. Errors of the disk and of memory pass, as
    the file may be whole.

    Args:
        file: its path.
        advice: what to do with a damaged file.
        what: the damage, for the line.

    Raises:
        FileNotFoundError: there is no such file.
        NotEnoughMemory: it does not fit into what is left.
        OSError: of the disk; it names the file.
        ValueError: it is damaged.
    """
    try:
        with memory_to_read(file, file.stat().st_size):
            yield
    except (FileNotFoundError, NotEnoughMemory):
        raise
    except Exception as error:  # zipfile and NumPy raise many kinds
        for found in (error, error.__context__):  # zipfile hides what the disk says behind an error of its own
            if isinstance(found, OSError) and found.errno in ADVICE:
                found.filename = found.filename or str(file)
                raise found from None
        raise ValueError(f"{file}: {what} ({one_line(error)}); {advice}") from None


def read_matrix(file: Path, shape: tuple[int, int] | None = None, advice: str = "copy it again") -> np.ndarray:
    """Reads a .npy file of numbers in two dimensions. Errors as of `damage_named`.

    Args:
        file: its path.
        shape: of the array; None: any. Its header may claim more than the file holds, or less.
        advice: what to do with a file that is not such an array.
    """
    with damage_named(file, advice, "not readable as an array of NumPy"):
        array = np.load(file, mmap_mode="r", allow_pickle=False)  # compares the sizes before it takes memory
        fits = isinstance(array, np.ndarray) and (array.ndim == 2 if shape is None else array.shape == shape)
        if not fits or array.dtype.kind not in "iuf":
            raise ValueError("expected {} x {} numbers".format(*("any", "any") if shape is None else shape))
        if (end := array.offset + array.nbytes) != file.stat().st_size:  # as where ends of lines were converted
            raise ValueError(f"{file.stat().st_size} bytes instead of {end}")
        return np.array(array)
