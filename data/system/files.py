"""Files and folders that are either whole or not there."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.system.disk_errors import about


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which is renamed to it when the block ends without an error.

    The folder is created where it is missing. After an error nothing is left: `path` is as it was before. Processes of
    several machines may write the same file at the same time; the last one wins. Errors of the disk name `path`.

    Example::

        with atomic_write(folder / "grid.png") as partial:
            picture.save(partial, format="PNG")
    """
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with about(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            to_disk(partial)  # before it has its name: no empty file after a power failure
            move(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def remove_partial(path: Path, seconds: float) -> None:
    """Remove what processes that were killed in `atomic_write` left of a file, `seconds` after its last change."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.[0-9]*"):
        if is_old(partial, seconds):
            partial.unlink(missing_ok=True)


def is_old(path: Path, seconds: float) -> bool:
    """Whether a file or folder is there, and has not been changed for so many seconds."""
    with suppress(FileNotFoundError):  # its process goes on after all, and has just renamed or removed it
        return time.time() - path.stat().st_mtime > seconds
    return False


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any, indent: int | None = None) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def read_object(path: Path, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file, which need not be trusted.

    Args:
        path: of the file.
        hook: takes each object in the file as soon as it is read, the inner ones first, and gives what stands for it.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where there is none.
        ValueError: what is wrong with its content. The message does not name the file.
    """
    with about(path):
        data = path.read_bytes()
    return parse_object(data, hook)


def parse_object(data: bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The JSON object in the content of a file, which need not be trusted. Raises ValueError, as `read_object`."""
    try:
        text = data.decode("utf-8")
        del data  # of an index, half a gigabyte
        values = json.loads(text, object_hook=hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def read_if_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file, or it holds something else."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new temporary folder beside `path`, which replaces it when the block ends without an error.

    Its files are on the disk before it has its name. The old folder, where there is one, is removed only after that.
    What processes that were killed have left beside it is removed first, or gets the name if that was all that it
    lacked. Of two processes that write it at the same time, the last one wins; on file systems whose folders cannot be
    locked, such as NFS, the first one fails. Errors of the disk name `path`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    aside = path.with_name(f".{path.name}.old.{os.getpid()}")
    with about(path, partial):
        _recover(path)
        partial.mkdir(parents=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            _in_use(lock)
            yield partial
            for file in partial.rglob("*.safetensors"):  # safetensors 0.8 lets only their owner read them
                file.chmod(partial.stat().st_mode & 0o666)
            to_disk(partial)
            if os.path.lexists(path):  # also a link to nothing
                move(path, aside)
            move(partial, path)
        finally:
            if os.path.lexists(aside) and not os.path.lexists(path):
                move(aside, path)
            _remove(partial)
            _remove(aside)
            os.close(lock)


def _recover(path: Path) -> None:
    """Finish what a process began that was killed in `atomic_folder`."""
    left = {
        part.name.removeprefix(f".{path.name}."): part
        for part in path.parent.glob(f".{glob.escape(path.name)}.*")
        if re.fullmatch(r"(old\.)?\d+", part.name.removeprefix(f".{path.name}."))
    }
    for name, part in [*left.items()]:
        if _is_written(part):
            del left[name]
            left.pop(f"old.{name}", None)
    for name, old in left.items():
        if name.startswith("old.") and not path.exists():  # killed between the two renames: the new one is complete
            move(left.get(name.removeprefix("old."), old), path)
    for part in left.values():
        _remove(part)


def _is_written(partial: Path) -> bool:
    """Whether a process that lives writes a folder."""
    try:
        folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it has just been renamed, or is not a folder
        return False
    try:
        return _in_use(folder)
    finally:
        os.close(folder)


def _in_use(folder: int) -> bool:
    """Whether another process has the lock of an open folder, which this one otherwise takes until it closes it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no such locks
        pass
    return False


def _remove(path: Path) -> None:
    """Remove a folder, or the link or file that was in its place; without an error where that is not possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def to_disk(path: Path) -> None:
    """Bring a file, or a folder with all that is in it, to the disk: so far it may be in memory only.

    Errors of the disk name the file.
    """
    for inner in path.iterdir() if path.is_dir() else ():
        to_disk(inner)
    number = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems refuse folders, and bring them to the disk by themselves.
        with suppress(OSError) if path.is_dir() else about(path):
            os.fsync(number)
    finally:
        os.close(number)


def move(source: Path, target: Path) -> None:
    """Rename a file, a link or a folder, also in place of a file or a link that has the name.

    NFS repeats a request whose answer was lost, for instance when another server takes over. If the first one was done,
    the answer to the second is that `source` is not there; or, of what was to be made, that it is there already.
    """
    moved = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        if not (os.path.lexists(target) and os.path.samestat(moved, target.lstat())):
            raise


def make_empty(folder: Path) -> None:
    """Make a folder, in place of what is there."""
    _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)  # see `move`
    for left in folder.iterdir():  # which the cache of a network file system has not shown
        _remove(left)


def name_once(partial: Path, path: Path) -> None:
    """Give a file its name, unless another process was first."""
    try:
        os.link(partial, path)  # unlike a rename, it fails where there is one
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(partial, path)


def point_to(link: Path, path: Path) -> None:
    """Make a link to a file or folder beside it, in place of the one that it was."""
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(path.name)
    except FileExistsError:  # see `move`
        if os.readlink(partial) != path.name:
            raise
    move(partial, link)
