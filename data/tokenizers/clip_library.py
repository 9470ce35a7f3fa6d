"""open_clip, imported without Weights & Biases: `from data.tokenizers.clip_library import open_clip`.

open_clip imports timm, and timm imports wandb where it is installed, for training scripts of its own. Imported at that
depth and after Composer, wandb takes a minute of CPU time in every process, because pydantic looks for the source of
each of wandb's models in all stack frames and all loaded modules. Without it, open_clip takes a second. The W&B logger
is not affected: it imports wandb itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Within it, importing a package fails as if it were not installed; one that is imported already stays so."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment] - what the import system takes for "cannot be imported"
    try:
        yield
    finally:
        del sys.modules[name]


with hidden("wandb"):
    import open_clip

__all__ = ["open_clip"]
