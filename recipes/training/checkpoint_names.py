"""How the checkpoints of each engine are known by their names, in a folder that may hold those of both."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from data.system.files import point_to

REST = "rest.pt"  # of a sharded checkpoint of Lightning
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
        """The checkpoints in a folder, oldest first."""
        found = [path for path in folder.glob("ep*-ba*") if self._has(path)]
        # Of two of a batch, one was saved before the end of its epoch was counted.
        return sorted(found, key=lambda path: (batch_of(path.name), int(NAME.match(path.name)["epoch"])))

    def newest(self, folder: Path) -> Path | None:
        """The one to which the link points or, where the link is lost, the one of the last batch."""
        link = folder / self.link
        if link.exists():
            return resolved(link)
        return next(reversed(self.all(folder)), None)

    def mend(self, folder: Path) -> None:
        """If the link is lost, it points to the newest checkpoint again. Only the first rank calls this."""
        if not (folder / self.link).exists() and (newest := self.newest(folder)) is not None:
            point_to(folder / self.link, newest)

    def name_of(self, epoch: int, batch: int, sharded: bool) -> str:
        """The name of a checkpoint's file or folder."""
        return f"ep{epoch}-ba{batch}" if sharded else f"ep{epoch}-ba{batch}{self.suffix}"

    def _has(self, path: Path) -> bool:
        if path.is_dir():
            of_lightning = (path / REST).is_file()
            return NAME.fullmatch(path.name) is not None and of_lightning == (self.engine == "lightning")
        return NAME.fullmatch(path.name.removesuffix(self.suffix)) is not None and path.name.endswith(self.suffix)


KINDS = {
    kind.engine: kind
    for kind in (Kind("composer", "latest-rank0.pt", "-rank0.pt"), Kind("lightning", "latest", ".ckpt"))
}


def resolved(path: Path) -> Path:
    """The file or folder of a checkpoint that a path or a link names: Composer's own link names a part of a folder."""
    path = path.resolve(strict=True)  # else a link that the disk does not give is taken for the checkpoint itself
    return path.parent if path.suffix == ".distcp" else path


def conversion(path: Path | str, engine: str) -> str:
    """The command that converts a checkpoint for an engine, as messages name it."""
    return f"`python recipes/convert_checkpoint.py {shlex.quote(str(path))} --to {engine}`"


def batch_of(checkpoint: str) -> int | None:
    """The batch in the name of a checkpoint; None for other names."""
    match = NAME.match(checkpoint)
    return None if match is None else int(match["batch"])


def has_checkpoints(output: Path) -> bool:
    """Whether a run's folder holds a checkpoint, also where the link to the newest one is lost."""
    return next((output / "checkpoints").glob("ep*-ba*"), None) is not None


def newest_of_each(folder: Path) -> list[Path]:
    """The newest checkpoint of each engine that wrote any."""
    return [newest for kind in KINDS.values() if (newest := kind.newest(folder)) is not None]


def newest_of_all(folder: Path) -> Path | None:
    """The one of the last batch among the newest checkpoints of the engines, as resumption counts; None: there is
    none."""
    return max(newest_of_each(folder), key=lambda path: batch_of(path.name) or 0, default=None)


def last_written(folder: Path) -> Path | None:
    """The one that was written last among the newest checkpoints of the engines; None: there is none. In a folder
    that another run began anew under the other engine, it is that run's."""
    return max(newest_of_each(folder), key=lambda path: path.stat().st_mtime, default=None)


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
                f"convert it with {conversion(newest, engine)}, or set training.engine={kind.engine}"
            )
