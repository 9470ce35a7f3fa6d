"""How the checkpoints of each engine are known by their names, in a folder that may hold those of both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recipes.engines.lightning.checkpoint_format import LATEST, REST

NAME = re.compile(r"ep(?P<epoch>\d+)-ba(?P<batch>\d+)")  # how the names of all checkpoints begin


@dataclass(frozen=True)
class Kind:
    """The checkpoints of an engine.

    Attributes:
        engine: its name, `training.engine`.
        link: name of the link to the newest one.
        suffix: of a full one; a sharded one is a folder.
    """

    engine: str
    link: str
    suffix: str

    def all(self, folder: Path) -> list[Path]:
        """Those in a folder, oldest first."""
        found = [path for path in folder.glob("ep*-ba*") if self._has(path)]
        # Of two of a batch, one was saved before the end of its epoch was counted.
        return sorted(found, key=lambda path: (batch_of(path.name), int(NAME.match(path.name)["epoch"])))

    def newest(self, folder: Path) -> Path | None:
        """The one to which the link points or, where the link is lost, the one of the last batch."""
        link = folder / self.link
        if link.exists():
            path = link.resolve()
            return path.parent if path.suffix == ".distcp" else path  # of Composer's own, a part of it
        return next(reversed(self.all(folder)), None)

    def _has(self, path: Path) -> bool:
        if path.is_dir():
            of_lightning = (path / REST).is_file()
            return NAME.fullmatch(path.name) is not None and of_lightning == (self.engine == "lightning")
        return NAME.fullmatch(path.name.removesuffix(self.suffix)) is not None and path.name.endswith(self.suffix)


KINDS = {
    kind.engine: kind for kind in (Kind("composer", "latest-rank0.pt", "-rank0.pt"), Kind("lightning", LATEST, ".ckpt"))
}


def batch_of(checkpoint: str) -> int | None:
    """The batch in the name of a checkpoint; None for other names."""
    match = NAME.match(checkpoint)
    return None if match is None else int(match["batch"])


def newest_of_all(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, whichever engine wrote it; None: there is none."""
    found = [newest for kind in KINDS.values() if (newest := kind.newest(folder)) is not None]
    return max(found, key=lambda path: batch_of(path.name) or 0, default=None)


def check_engine(folder: Path, engine: str) -> None:
    """Whether an engine can go on from the newest checkpoint in a folder.

    Raises:
        ValueError: the other engine wrote it. This one would begin anew beside it, or repeat batches from its own.
    """
    own = KINDS[engine].newest(folder)
    for kind in KINDS.values():
        newest = kind.newest(folder)
        if kind.engine == engine or newest is None:
            continue
        if own is None or (batch_of(own.name) or 0) < (batch_of(newest.name) or 0):
            raise ValueError(
                f"checkpoints.autoresume: the newest checkpoint, {newest}, was written by {kind.engine.capitalize()}; "
                f"convert it with `python recipes/convert_checkpoint.py {newest} --to {engine}`, or set "
                f"training.engine: {kind.engine}"
            )
