"""Pictures in MDS shards that were made to hurt."""

import json

import numpy as np
from streaming import MDSWriter

from data.sources.mds import MDSSource
from tests.data.test_sources import read


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
