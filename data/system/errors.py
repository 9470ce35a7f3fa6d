"""Errors of libraries and of worker processes, in the words of one line."""


class WorkersError(Exception):
    """An error that worker processes of a loader raise, and that is one line for the user."""

    @property
    def line(self) -> str:
        """The last line, without what PyTorch adds to errors of worker processes."""
        return str(self).strip().splitlines()[-1].removeprefix(f"{type(self).__module__}.{type(self).__name__}: ")


class Outage(ValueError):
    """A store or a server does not answer, and later may. A command ends with status 1 by it, and not with 2: cluster
    jobs start again."""


def one_line(error: BaseException) -> str:
    """An error of a library in one line, with its type where the text alone would say little."""
    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__} {text}".strip()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where there is no text, in at most 200 characters."""
    return (str(error) or type(error).__name__).split("\n")[0][:200]
