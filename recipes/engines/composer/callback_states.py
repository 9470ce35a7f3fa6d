"""States of callbacks in Composer's checkpoints: each is one value, which a sharded checkpoint keeps as it is.

PyTorch would take its dicts and lists apart, and a list could then be loaded only into one that is as long already.
"""

from __future__ import annotations

from typing import Any

WHOLE = "whole"  # key of the state of a callback, in a tuple, which PyTorch does not take apart


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a callback as checkpoints hold it; empty if it is."""
    return {WHOLE: (state,)} if state else {}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a callback from a checkpoint. Earlier versions did not pack it."""
    return state[WHOLE][0] if WHOLE in state else state
