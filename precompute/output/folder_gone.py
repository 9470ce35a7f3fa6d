"""The error of a rank that another one has taken for lost."""

from __future__ import annotations

from pathlib import Path


class FolderGone(FileNotFoundError):
    """The folder in which a shard was written was removed meanwhile.

    That is no error where another rank took this one for lost, has finished the shard, and removed what it thought a
    killed process had left.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: removed while it was written; leave the folder alone and start the job again")
