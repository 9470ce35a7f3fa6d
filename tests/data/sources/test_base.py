"""What patterns match, and folders that cannot be listed."""

import errno
import glob
import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from data.sources.base import files_below, files_matching
from data.sources.tars import TarSource
from data.sources.texts import TextSource

FILES = ["a/0.tar", "a/1.tar", "a/x/0.tar", "b/x/0.tar", "b/x/y/0.tar", "lost+found/0.tar", ".hidden/0.tar", "c.tar"]


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def closed(folder, monkeypatch):
    """Makes a folder one that cannot be listed, also for root."""
    real = os.scandir

    def close(name):
        def scandir(path="."):
            if os.path.realpath(path) == str(folder / name):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)

    return close


PATTERNS = ["*.tar", "*/*.tar", "?/x/*.tar", "**/*.tar", "b/**", "b/**/y/*", "a/[01].tar", "no/*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_those_of_glob_do(folder, pattern, closed, monkeypatch):
    closed("lost+found")  # which nothing but root can list on a real disk
    monkeypatch.chdir(folder)
    for one in (pattern, f"{folder}/{pattern}"):
        assert sorted(files_matching(one)) == sorted(glob.glob(one, recursive=True))


@pytest.mark.parametrize(
    ("name", "pattern"), [("b/x", "*/x/*.tar"), ("a", "*/*.tar"), ("b/x/y", "**/*.tar"), ("b/x", "b/**/y/*.tar")]
)
def test_a_folder_that_cannot_be_listed_is_an_error(folder, closed, name, pattern):
    """`glob` leaves it out, and a set would be complete without what is in it."""
    closed(name)
    for source in (lambda path: TarSource(urls=path), lambda path: TextSource(files=[path])):
        with pytest.raises(PermissionError) as error:
            source(f"{folder}/{pattern}")
        assert Path(error.value.filename) == folder / name


@pytest.mark.parametrize("pattern", ["*/x/*.tar", "*/x/0.tar"])
def test_a_folder_that_may_not_be_entered_is_an_error(folder, monkeypatch, pattern):
    """Its names can be listed, and `glob` takes what is in it for missing. Of lost+found, nothing is said."""
    (folder / "lost+found" / "x").mkdir()

    def closed(real):
        def look(path, *arguments, **options):
            if str(path).startswith((f"{folder}/b/", f"{folder}/lost+found/")):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, closed(getattr(os, name)))
    with pytest.raises(PermissionError) as error:
        TarSource(urls=f"{folder}/{pattern}")
    assert error.value.filename == f"{folder}/b/x"


def test_a_folder_whose_names_are_not_given_is_an_error(folder, monkeypatch):
    """A lost file server may open it, and say no more."""
    real = os.scandir

    def scandir(path="."):
        if os.path.realpath(path) != str(folder / "a"):
            return real(path)
        return nullcontext(iter(Mock(side_effect=OSError(errno.ESTALE, "Stale file handle", str(path))), None))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Stale"):
        TarSource(urls=f"{folder}/*/*.tar")


def test_what_is_not_known_of_a_file_does_not_leave_it_out(folder, monkeypatch):
    """`os.path.isfile` says no of a file that a lost mount does not give, and `os.walk` takes a folder for a file."""
    (folder / "b" / "link").symlink_to(folder / "lost")
    real = os.stat

    def stat(path, *arguments, **options):
        if str(path) in (f"{folder}/a/1.tar", f"{folder}/b/link"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    for make in (
        lambda: TarSource(urls=f"{folder}/a/{{0,1}}.tar"),
        lambda: TextSource(files=[f"{folder}/a/1.tar"]),
        lambda: TextSource(files=[f"{folder}/a/*.tar"]),
        lambda: list(files_below(folder)),
    ):
        with pytest.raises(OSError, match="Stale"):
            make()
