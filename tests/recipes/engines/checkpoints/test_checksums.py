"""Checkpoints are read by PyTorch and by this repository, and a change of what is no tensor is found."""

import errno
import io
import zipfile
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.serialization import get_crc32_options

from recipes.engines.checkpoints.checksums import save_full
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint, load_plain, plain_pickles
from recipes.engines.checkpoints.save_planner import save_sharded


@pytest.fixture
def values():
    weights = torch.arange(6.0).reshape(2, 3)
    return {"weights": {"a": weights, "row of a": weights[1]}, "counts": {"batch": 7}, "text": "ä" * 100}


@pytest.fixture
def file(tmp_path, values):
    save_full(values, tmp_path / "ep0-ba7.pt")
    return tmp_path / "ep0-ba7.pt"


@pytest.mark.parametrize("load", [torch.load, load_plain, lambda file: load_plain(file, lazily=True)])
def test_what_was_saved_is_read(file, values, load):
    found = load(file)
    assert found.keys() == values.keys() and found["counts"] == {"batch": 7} and found["text"] == values["text"]
    weights, row = found["weights"].values()
    assert torch.equal(weights, values["weights"]["a"])
    row.zero_()  # it is still a part of the other
    assert weights[1].count_nonzero() == 0


def test_the_file_is_that_of_torch_save_but_for_checksums(file, values, tmp_path):
    torch.save(values, tmp_path / "theirs.pt")
    assert get_crc32_options()  # as before
    directories = []
    for path in (file, tmp_path / "theirs.pt"):
        with zipfile.ZipFile(path) as records:
            directories.append({r.filename.partition("/")[2]: (r.file_size, r.CRC) for r in records.infolist()})
            assert path != file or records.read("archive/data.pkl")  # which compares the checksum
    ours, theirs = directories
    assert ours.keys() == theirs.keys() and all(ours[name][0] == theirs[name][0] for name in theirs)
    assert ours["data.pkl"] == theirs["data.pkl"] and ours["data/0"][1] == 0


def test_a_changed_name_is_found(file):
    data = file.read_bytes()
    file.write_bytes(data.replace(b"row of a", b"row of b"))
    with pytest.raises(DamagedCheckpoint, match="Bad CRC-32"):
        load_plain(file)


def test_a_checkpoint_that_the_disk_does_not_give_is_not_called_damaged(file, monkeypatch):
    """Its user would remove it."""
    lost = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(zipfile, "_EndRecData", lost)  # where the end of the file is read, whose errors zipfile hides
    with pytest.raises(OSError, match="Input/output") as error:
        load_plain(file)
    assert error.value.filename == str(file)


def test_an_error_leaves_pytorchs_setting(tmp_path):
    with pytest.raises(IsADirectoryError):
        save_full({}, tmp_path)
    with pytest.raises(AttributeError):
        save_full({"f": lambda: None}, tmp_path / "x")
    assert get_crc32_options()


def test_of_a_sharded_checkpoint_tensors_have_no_checksums(tmp_path):
    weights = torch.arange(6.0)
    save_sharded({"weights": weights, "text": "row of a"}, tmp_path, batch=7)
    assert get_crc32_options()
    part, places = (tmp_path / "__0_0.distcp").read_bytes(), dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    records = {}
    for index, place in places.items():
        stored = io.BytesIO(part[place.offset : place.offset + place.length])
        records[index.fqn] = {r.filename.partition("/")[2]: r.CRC for r in zipfile.ZipFile(stored).infolist()}
    assert records["weights"]["data/0"] == 0 and records["text"]["data.pkl"] != 0

    def load():
        found = {"weights": torch.zeros(6), "text": ""}
        with plain_pickles():
            dcp.load(found, checkpoint_id=tmp_path)
        return found

    found = load()
    assert torch.equal(found["weights"], weights) and found["text"] == "row of a"
    (tmp_path / "__0_0.distcp").write_bytes(part.replace(b"row of a", b"row of b"))
    with pytest.raises(DamagedCheckpoint, match="Bad CRC-32"):
        load()
