"""Pictures in MDS shards that were made to hurt."""

import errno
import json
from unittest.mock import Mock

import numpy as np
import pytest
from streaming import MDSWriter

from data.sources.mds import MDSSource
from tests.data.sources.test_sources import mds_source, read


def test_mds_pictures_that_claim_more_pixels_than_they_have(tmp_path):
    """Pillow would take memory for them before it finds out."""
    claims = np.array([40_000, 40_000, 3], np.uint32).tobytes() + b"RGB"
    with MDSWriter(out=str(tmp_path), columns={"image": "bytes", "caption": "str"}) as writer:
        writer.write({"image": claims, "caption": "a dot"})
        writer.write({"image": b"", "caption": "a dot"})
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["shards"][0]
    entry["column_encodings"][entry["column_names"].index("image")] = "pil"
    (tmp_path / "index.json").write_text(json.dumps(index))
    large, empty = read(MDSSource(path=str(tmp_path)))
    assert large.reason == empty.reason == "broken_image"
    assert large.detail == "ValueError: it claims 40000x40000 pixels in 15 bytes"


def test_places_that_the_disk_does_not_give_reject_no_sample(tmp_path, monkeypatch):
    """NumPy takes an error of the disk for the end of a file, as if the shard were damaged."""
    source = mds_source(tmp_path, "bytes")
    lost = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr("data.sources.mds.open", lost, raising=False)
    with pytest.raises(OSError, match="Input/output"):
        read(source)


def test_a_picture_that_lacks_memory_is_not_broken(tmp_path, monkeypatch):
    """A picture that is rejected is never read again."""
    source = mds_source(tmp_path, "pil")
    monkeypatch.setattr("streaming.base.format.mds.encodings.mds_decode", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        read(source)
