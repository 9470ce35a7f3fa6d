"""Arrays of NumPy in files that nobody should trust."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_array(file: Path, dimensions: int) -> np.ndarray:
    """Reads a .npy file of numbers.

    Args:
        file: its path.
        dimensions: number of dimensions that it must have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such an array; its header may claim more than the file holds.
    """
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)  # compares the sizes before it takes memory
        if not isinstance(array, np.ndarray) or array.ndim != dimensions or array.dtype.kind not in "iuf":
            raise ValueError(f"expected numbers in {dimensions} dimensions")
        return np.array(array)
    except FileNotFoundError:
        raise
    except Exception as error:  # on damaged bytes, NumPy raises nearly anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{file}: not readable as an array of NumPy ({reason}); copy it again") from None
