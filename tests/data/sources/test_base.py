"""What patterns match, and folders that cannot be listed."""

import glob
import os
from pathlib import Path

import pytest

from data.sources.base import files_matching
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
