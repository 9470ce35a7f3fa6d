"""Which shards sources list: none is lost because a folder cannot be read, or because two ids are the same."""

import errno
import hashlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.base import shard_id, shard_ids
from data.sources.folder import FolderSource
from data.sources.mds import MDSSource
from data.sources.parquet import ParquetSource
from data.sources.tars import TarSource


@pytest.mark.parametrize("build", [FolderSource, ParquetSource])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_is_an_error(build, number, tmp_path, monkeypatch):
    for name, suffix in (("a", "PARQUET"), ("b", "parquet"), ("c", "parquet")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(b"")
        (tmp_path / name / "0.txt").write_text("a text")
        pq.write_table(pa.table({"image": [b""], "text": ["a text"]}), tmp_path / name / f"0.{suffix}")
    assert len(build(path=str(tmp_path), shard_size=1).shards()) == 3
    (tmp_path / "lost+found").mkdir()
    scandir, unreadable = os.scandir, ["lost+found"]

    def refused(path="."):
        if os.path.basename(path) in unreadable:
            raise OSError(number, os.strerror(number), path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refused)
    assert len(build(path=str(tmp_path), shard_size=1).shards()) == 3
    unreadable.append("b")
    with pytest.raises(OSError, match=os.strerror(number)):
        build(path=str(tmp_path))


def alike(identity):
    """Two numbers n of which `identity(n)` has the same eight digits."""
    seen = {}
    for number in range(1 << 20):
        digits = hashlib.sha256("\0".join(map(str, identity(number))).encode()).hexdigest()[:8]
        if digits in seen:
            return seen[digits], number
        seen[digits] = number
    raise AssertionError("no two are alike")


def test_shards_whose_hashes_begin_alike_are_all_listed(tmp_path):
    def file(number):
        return f"{number}/shard.00000.mds", 0, 4

    one, other = alike(file)
    entry = {"format": "mds", "version": 2, "samples": 0, "compression": None, "hashes": [], "zip_data": None}
    entry |= {"column_names": ["image", "caption"], "column_encodings": ["bytes", "str"], "column_sizes": [None, None]}
    raw = [{"basename": file(number)[0], "bytes": 4, "hashes": {}} for number in (one, -1, other)]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [entry | {"raw_data": r} for r in raw]}))
    source = MDSSource(path=str(tmp_path))
    assert [source.infos[shard]["raw_data"] for shard in source.shards()] == raw
    assert source.shards()[1] == shard_id("shard.00000", *file(-1))  # others are as they were

    one, other = alike(lambda number: (f"https://host/{number}/0.tar", None))
    urls = [f"https://host/{number}/0.tar" for number in (one, other)]
    assert list(TarSource(urls=urls).urls.values()) == urls
    assert shard_ids([("a", (1, "x")), ("b", (1, "x"))]) == [shard_id("a", 1, "x"), shard_id("b", 1, "x")]
