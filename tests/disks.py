"""Disks that are full, small or read-only, for tests: real ones where the tests may mount file systems."""

import os
import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: float = 2):
    """Inside, `folder` is a file system of this size in memory. Skips the test where nothing may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no command `mount`")
    if mounted.returncode:
        pytest.skip(f"may not mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(folder: Path, is_so: bool = True) -> None:
    """Make a `small_disk` read-only, or writable again."""
    subprocess.run(["mount", "-o", f"remount,{'ro' if is_so else 'rw'}", str(folder)], check=True)


def fill(folder: Path, room: int = 0) -> Path:
    """Fill a `small_disk` but for some bytes with one file, which is returned."""
    free = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - room)))
    return filler


@contextmanager
def small_files(size: int):
    """Inside, this process can write no file beyond a size: to it the disk is full there, without any rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_disk_before_named(patch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """From now on, by the path of each file and folder that gets another name: what in it has been brought to the disk
    by then, which a power failure would otherwise take."""
    done, before = [], {}
    patch.setattr(os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}")))
    for function, real in (("rename", os.rename), ("replace", os.replace), ("link", os.link)):

        def name(old, new, real=real):
            before[str(old)] = {path for path in done if Path(path).is_relative_to(old)}
            real(old, new)

        patch.setattr(os, function, name)
    return before
