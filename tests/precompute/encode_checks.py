"""Comparisons of encoded sets, and errors of the encode job, for its tests."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from precompute.encode import main

# One unit in the last place of float16 at 4, which is the size of these latents' largest values. Another order of
# additions in fp32 can change the rounding by as much.
ULP = 4e-3


def assert_same(one: list[dict], other: list[dict]) -> None:
    """The sets are equal up to one rounding, in the same order."""
    assert [s["key"] for s in one] == [s["key"] for s in other]
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(value.astype(float), right[name].astype(float), atol=ULP, err_msg=name)
            else:
                assert value == right[name], name


def error_of(main: Callable[[list[str]], None], arguments: list[str], capsys, status: int = 2) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == status
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


expect_error = partial(error_of, main)
