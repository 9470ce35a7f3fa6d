"""Numbers of a recipe that must lie in a range, as components check them."""

from __future__ import annotations

from typing import Any


def check_least(owner: str, least: int, **values: float | None) -> None:
    """
    Args:
        owner: name of the component, for messages.
        least: smallest value.
        values: by the names of their keys; None: not given.

    Raises:
        ValueError: one of them is smaller.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{owner}: {name}: {value}; give {least} or more")


def check_shares(owner: str, **values: float) -> None:
    """
    Args:
        owner: name of the component, for messages.
        values: by the names of their keys.

    Raises:
        ValueError: one of them is not from 0 to 1.
    """
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{owner}: {name} is a share from 0 to 1, got {value}")


def check_reading(
    kind: str,
    *,
    workers: int,
    shuffle_block: int | None,
    predownload: int | None,
    cache_limit: str | None,
    epoch_size: int | None,
    **others: Any,
) -> None:
    """Check the numbers and sizes that all components that read encoded sets take. The arguments are theirs.

    Args:
        kind: name of the component.
        others: arguments that are not checked here.

    Raises:
        ValueError: one of them is out of range.
    """
    check_least(kind, 0, workers=workers)
    check_least(kind, 1, predownload=predownload, epoch_size=epoch_size)
    check_least(kind, 2, shuffle_block=shuffle_block)  # py1br draws sizes below it
    if cache_limit is not None and bytes_of(cache_limit) is None:
        raise ValueError(f"{kind}: cache_limit: {cache_limit}; give a size such as 100gb")


def bytes_of(size: str) -> int | None:
    """A size such as 100gb in bytes, as streaming reads it; None: it is no size, or not above 0."""
    from streaming.base.util import bytes_to_int  # here, so that checks of sources do not wait for it

    try:
        return max(0, bytes_to_int(size)) or None
    except (ValueError, OverflowError):  # the latter for infinity
        return None
