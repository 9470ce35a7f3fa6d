"""What an exit status says to a scheduler, and that of several processes together."""

from __future__ import annotations

from collections.abc import Iterable

from recipes.training.stop import EXIT_CODE

DONE = 0
FAILED = 1
MISTAKE = 2  # described in one line; the same command fails again
AGAIN = EXIT_CODE


def status_of(codes: Iterable[int]) -> int:
    """The exit status of several processes of one run.

    A mistake in the config comes first, since starting again cannot help: the processes beside it may have been asked
    to stop meanwhile, and say "again". A crash comes before "again" for the same reason.

    Args:
        codes: of processes that ended by themselves; that of a process that a signal killed is 128 + its number, or
            negative as `subprocess` has it.

    Example::

        status_of([85, 2, 85])  # 2
    """
    codes = [code if code >= 0 else 128 - code for code in codes]
    if MISTAKE in codes:
        return MISTAKE
    failed = next((code for code in codes if code not in (DONE, AGAIN)), None)
    if failed is not None:
        return failed
    return AGAIN if AGAIN in codes else DONE
