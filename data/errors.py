"""Errors of libraries, in the words of one line."""


def one_line(error: BaseException) -> str:
    """An error of a library in one line, with its type where the text alone would say little."""
    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__} {text}".strip()
