"""The newest checkpoint in a run's folder, whichever engine wrote it."""

from __future__ import annotations

from pathlib import Path

LINKS = ("latest-rank0.pt", "latest")  # of the engines `composer` and `lightning`


def newest_checkpoint(output: Path) -> Path | None:
    """The path of the newest checkpoint of a run; None if it has none."""
    links = [output / "checkpoints" / name for name in LINKS]
    found = [link.resolve() for link in links if link.exists()]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def has_checkpoints(output: Path) -> bool:
    """Whether a run's folder holds a checkpoint, also where the link to the newest one is lost."""
    return next((output / "checkpoints").glob("ep*-ba*"), None) is not None
