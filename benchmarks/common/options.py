"""Types of options on the command lines of benchmarks."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; give a whole number of 1 or more")
    return number
