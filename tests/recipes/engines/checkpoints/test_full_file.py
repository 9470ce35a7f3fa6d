"""Full checkpoints are read by PyTorch and by this repository, and a change of what is no tensor is found."""

import zipfile

import pytest
import torch
from torch.serialization import get_crc32_options

from recipes.engines.checkpoints.full_file import save_full
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint, load_plain


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


def test_an_error_leaves_pytorchs_setting(tmp_path):
    with pytest.raises(IsADirectoryError):
        save_full({}, tmp_path)
    with pytest.raises(AttributeError):
        save_full({"f": lambda: None}, tmp_path / "x")
    assert get_crc32_options()
