"""Files appear whole or not at all."""

import json
from pathlib import Path

import pytest

from data.files import atomic_folder, atomic_write, write_json


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


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "export"
    for name in ("old", "new"):
        with atomic_folder(folder) as partial:
            (partial / name).touch()
    assert [file.name for file in folder.iterdir()] == ["new"]

    with pytest.raises(KeyError), atomic_folder(folder) as partial:
        Path(partial, "half").touch()
        raise KeyError
    assert [file.name for file in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]
