"""Errors of libraries and of worker processes, in the words of one line."""

import dis
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# Characters that a terminal obeys, but for tabs and ends of lines, and those that turn the direction of a text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class WorkersError(Exception):
    """An error that worker processes of a loader raise, and that is one line for the user."""

    @property
    def line(self) -> str:
        """The last line, without what PyTorch adds to errors of worker processes."""
        return str(self).strip().splitlines()[-1].removeprefix(f"{type(self).__module__}.{type(self).__name__}: ")


class WrongResult(WorkersError, ValueError):
    """A component returns something else than its interface says. It ends a job, also where other errors of the same
    place are noted and passed over."""


class Outage(ValueError):
    """A store or a server does not answer, and later may. A command ends with status 1 by it, and not with 2: cluster
    jobs start again."""


@contextmanager
def noted(what: str) -> Iterator[None]:
    """A context of code that may be somebody's own. Its errors get a note, which their tracebacks end with, that says
    what was done. A `WorkersError` and a `MemoryError` get none: of those of worker processes, the last line is what is
    shown."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, WorkersError | MemoryError):
            error.add_note(what)
        raise


def together(steps: Iterable[Callable[[], None]]) -> None:
    """Take all steps, so that a user learns at once of all that is wrong.

    Raises:
        ValueError: of the only step that fails, or the lines of all that do.
    """
    refused = []
    for step in steps:
        try:
            step()
        except ValueError as error:
            refused.append(error)
    if len(refused) > 1:
        kind = Outage if all(isinstance(error, Outage) for error in refused) else ValueError
        raise kind("; ".join(map(str, refused)))
    for error in refused:
        raise error


def one_line(error: BaseException) -> str:
    """An error of a library in one line, with its type where the text alone would say little."""
    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__} {text}".strip()


def is_raised(error: BaseException) -> bool:
    """Whether a `raise` raised an error. Its text then says what is wrong; that of an operation, such as of `int("x")`
    or of two arrays that do not fit, says nothing without the line of the operation."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]] == "RAISE_VARARGS"


def starts_no_process(error: Exception) -> bool:
    """Whether the system refused a further process or thread, in the words of Python or PyTorch."""
    if isinstance(error, BlockingIOError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_code.co_name in ("_launch", "_execute_child")  # of multiprocessing and subprocess
    last = (str(error).strip().splitlines() or [""])[-1].removeprefix("RuntimeError: ")
    return isinstance(error, RuntimeError) and last in ("can't start new thread", "Resource temporarily unavailable")


def with_place(error: BaseException) -> str:
    """`one_line` of an error that may be a bug of somebody's own code, with its file and line unless the text alone
    says what is wrong."""
    text_says = isinstance(error, OSError | ValueError) and (type(error) is not ValueError or is_raised(error))
    # A generator turns a StopIteration of what it calls into a RuntimeError, whose own place is in the generator.
    cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
    place = traceback.extract_tb(cause.__traceback__)[-1]
    return one_line(error) + ("" if text_says else f" ({place.filename}, line {place.lineno})")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where there is no text, in at most 200 characters."""
    return (str(error) or type(error).__name__).split("\n")[0][:200]


def visible(text: str) -> str:
    """A text for a terminal, with escapes in the place of `CONTROLS`. What comes from a file of somebody else could
    clear the screen, and say that all is well."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
