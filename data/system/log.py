"""The one logger of the project. It writes plain lines to standard output, on the first rank; and one for all ranks."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from data.system.errors import visible


class _StandardOutput(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is at the time, and leaves nothing in a buffer."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # it is None where the process was started without one (>&-)
            super().emit(record)

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def _on_first_rank(_: logging.LogRecord) -> bool:
    # Launchers set RANK; reading it needs no torch, so that the command line can log before the slow imports.
    return os.environ.get("RANK", "0") == "0"


log = logging.getLogger("precompose")
log.setLevel(logging.INFO)
log.propagate = False  # Composer and Lightning configure the root logger, each in its own way
log.addFilter(_on_first_rank)
log.addHandler(_StandardOutput())

# The filter of `log`, which silences all ranks but the first, does not apply to loggers below it. Use this one for what
# a single rank has, such as what it has done, or that it was the one to finish the set.
every_rank = log.getChild("every_rank")


def say(line: str, file: int = 2) -> None:
    """Write a line past Python's files and loggers, whose locks the main thread may hold.

    Where nobody reads it any more, because Ctrl-C has ended `tee`, it is lost: an error would end the thread that says
    it, which has more to do.

    Args:
        line: without its end.
        file: number of the open file, standard error by default.
    """
    with suppress(OSError):
        os.write(file, f"{line}\n".encode())
