"""What a command says that refuses its arguments."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def last_error(main: Callable[[list[str]], Any], arguments: Iterable[object], capsys: pytest.CaptureFixture) -> str:
    """The last line of a command that ends with exit status 2."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and error.startswith("error: ")
    return error
