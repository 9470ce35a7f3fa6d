"""Files appear whole or not at all."""

import errno
import json
import os
import shutil
import signal
import stat
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from data.system.files import (
    atomic_folder,
    atomic_write,
    make_empty,
    point_to,
    read_object,
    to_disk,
    write_json,
    write_text,
)
from tests.disks import on_disk_before_named


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "new" / "record.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}

    with pytest.raises(KeyError), atomic_write(path) as partial:
        partial.write_text("half")
        assert json.loads(path.read_text()) == {"a": 1}
        raise KeyError
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"{", "line 1"), (b"[1]", "not a JSON object"), (b"\xff", "utf-8"), (b"[" * 200_000, "nested too deeply")],
)
def test_what_is_not_a_json_object_says_so(content, problem, tmp_path):
    (tmp_path / "values.json").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_object(tmp_path / "values.json")


def test_a_json_object_is_read(tmp_path):
    write_json(tmp_path / "values.json", {"a": [1, None]})
    assert read_object(tmp_path / "values.json") == {"a": [1, None]}
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none.json")


def test_a_disk_that_does_not_give_an_object_names_it(tmp_path, monkeypatch):
    """Not what is written meanwhile: a set's files are made of those of its shards."""
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="error") as refused, atomic_write(tmp_path / "index.json"):
        read_object(tmp_path / "shard.json")
    assert refused.value.filename == str(tmp_path / "shard.json")


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "export"
    for name in ("old", "new"):
        with atomic_folder(folder) as partial:
            save_file({"a": torch.zeros(1)}, partial / f"{name}.safetensors")
            (partial / "plain").touch()
    weights, plain = sorted(folder.iterdir())
    assert (weights.name, plain.name) == ("new.safetensors", "plain")
    assert weights.stat().st_mode == plain.stat().st_mode  # who may read the folder may read the weights

    with pytest.raises(KeyError), atomic_folder(folder) as partial:
        Path(partial, "half").touch()
        raise KeyError
    assert sorted(folder.iterdir()) == [weights, plain]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_a_link_or_a_file_in_the_place_of_a_folder_is_replaced(tmp_path, kind):
    """And nothing is left of it, of which a second one by the same process could not take the place."""
    other, folder = tmp_path / "other", tmp_path / "export"
    other.mkdir()
    (other / "kept").touch()
    if kind == "file":
        folder.touch()
    else:
        folder.symlink_to(other if kind == "link" else tmp_path / "nothing")
    for number in "12":
        with atomic_folder(folder) as partial:
            (partial / "number").write_text(number)
    assert (folder / "number").read_text() == "2" and not folder.is_symlink() and (other / "kept").exists()
    assert {part.name for part in tmp_path.iterdir()} == {"export", "other"}


def test_what_gets_a_name_is_on_the_disk(tmp_path, monkeypatch):
    """Otherwise it could hold half a file after a power failure, beside one that says that all is done."""
    before = on_disk_before_named(monkeypatch)
    with atomic_folder(tmp_path / "new" / "export") as folder:
        (folder / "unet").mkdir()
        for name in ("unet/weights", "done.json"):
            (folder / name).write_text("x")
    with atomic_write(tmp_path / "record.json") as file:
        file.write_text("x")
    parts = {f"{folder}{name}" for name in ("", "/unet", "/unet/weights", "/done.json")}
    assert before == {str(folder): parts, str(file): {str(file)}}


def test_a_disk_that_does_not_keep_a_file_is_an_error(tmp_path, monkeypatch):
    """Folders may be refused, as some network file systems do."""
    fsync = os.fsync
    for refused in (stat.S_ISDIR, stat.S_ISREG):

        def refuse(number, refused=refused):
            if refused(os.fstat(number).st_mode):
                raise OSError(errno.EIO, "Input/output error")
            fsync(number)

        monkeypatch.setattr(os, "fsync", refuse)
        error = pytest.raises(OSError, match="error") if refused is stat.S_ISREG else nullcontext()
        with error, atomic_folder(tmp_path / "export") as folder:
            (folder / refused.__name__).touch()
    assert [file.name for file in (tmp_path / "export").iterdir()] == ["S_ISDIR"]
    with pytest.raises(OSError, match="error") as refused:  # of a shard, say, which has a temporary name of its own
        to_disk(tmp_path / "export")
    assert refused.value.filename == str(tmp_path / "export" / "S_ISDIR")


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_between_two_renames_or_after_them_costs_no_folder(tmp_path, renames):
    folder = tmp_path / "export[1]"
    with atomic_folder(folder) as partial:
        (partial / "old").touch()
    child = os.fork()
    if not child:
        left = [Path.rename] * renames
        shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        Path.rename = lambda *paths: left.pop()(*paths) if left else os.kill(os.getpid(), signal.SIGKILL)
        with atomic_folder(folder) as partial:
            (partial / "new").touch()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(KeyError), atomic_folder(folder):
        raise KeyError
    assert [file.name for file in folder.iterdir()] == ["new" if renames else "old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_process_that_writes_the_same_folder_is_not_taken_for_a_killed_one(tmp_path):
    """The last one wins, as of files."""
    folder = tmp_path / "export"
    with atomic_folder(folder) as partial:
        if not (child := os.fork()):
            with atomic_folder(folder) as other:
                (other / "first").touch()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [file.name for file in folder.iterdir()] == ["first"]
        (partial / "last").touch()
    assert [file.name for file in folder.iterdir()] == ["last"] and list(tmp_path.iterdir()) == [folder]


def test_a_link_that_a_killed_process_has_not_named_is_no_obstacle(tmp_path):
    """In containers, processes get the same numbers again."""
    (tmp_path / f".latest.{os.getpid()}").symlink_to("ep0-ba1.ckpt")
    point_to(tmp_path / "latest", tmp_path / "ep0-ba2.ckpt")
    assert [(path.name, os.readlink(path)) for path in tmp_path.iterdir()] == [("latest", "ep0-ba2.ckpt")]


def test_the_old_folder_comes_back_where_the_new_one_cannot_get_its_name(tmp_path, monkeypatch):
    folder, rename = tmp_path / "export", Path.rename
    with atomic_folder(folder) as partial:
        (partial / "old").touch()

    def refuse(path, new):
        if path == partial:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match=f"Input/output error: '{folder}'"), atomic_folder(folder) as partial:
        (partial / "new").touch()
    assert [file.name for file in folder.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [folder]


def test_a_request_that_nfs_repeats_after_a_lost_answer_is_no_error(tmp_path, monkeypatch):
    """The server has done it, and answers the second request with an error."""

    def repeated(request):
        def twice(*arguments, **options):
            request(*arguments, **options)
            request(*arguments, **options)

        return twice

    for name in "rename", "replace", "symlink", "mkdir":
        monkeypatch.setattr(os, name, repeated(getattr(os, name)))
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    for number in range(2):
        (tmp_path / f"file-{number}").touch()
        point_to(tmp_path / "link", tmp_path / f"file-{number}")
    assert os.readlink(tmp_path / "link") == "file-1"
    make_empty(tmp_path / "folder")
    (tmp_path / "folder" / "file").touch()
    make_empty(tmp_path / "folder")
    assert not any((tmp_path / "folder").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file-0", "file-1", "folder", "link"]


def test_a_file_that_is_gone_before_it_has_its_name_is_an_error(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "file") as partial:
        partial.write_text("new")
        os.link(partial, tmp_path / "elsewhere")
        partial.unlink()
    assert (tmp_path / "file").read_text() == "old"
