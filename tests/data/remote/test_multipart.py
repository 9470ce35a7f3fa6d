"""Which unfinished uploads are removed, by encode jobs too."""

import pytest

from data.remote.multipart import abort_uploads
from precompute.output.upload import Copy
from tests.data.remote.bucket import serve


@pytest.fixture
def bucket(monkeypatch):
    with serve(monkeypatch) as bucket:
        yield bucket


def test_a_copy_that_is_made_again_removes_what_the_first_one_left(bucket, tmp_path):
    """Of the same files; other ranks may be at others."""
    (tmp_path / "shard.mds").write_text("a shard")
    other = "set/train/shards/b/shard.mds"
    for name in ("set/train/shards/a/shard.mds", other):
        bucket.client.create_multipart_upload(Bucket="sets", Key=name)
    Copy(tmp_path, "s3://sets/set/train").add(tmp_path, "shards/a", iter(["shard.mds"]))
    assert bucket.unfinished("set/") == [other] and bucket.names("set/train/shards") == ["a/shard.mds"]


def test_a_bucket_that_refuses_costs_a_warning(bucket, capsys):
    bucket.client.create_multipart_upload(Bucket="sets", Key="run/ep0-ba2")
    bucket.expired = True
    for _ in range(2):
        assert not abort_uploads(bucket.client, "sets", "run/", ["ep0-ba2"])
    bucket.expired = False
    (line,) = capsys.readouterr().out.splitlines()
    assert "s3://sets: unfinished uploads of killed processes cannot be removed" in line and "lifecycle rule" in line
    assert abort_uploads(bucket.client, "sets", "run/", ["ep0-ba2"]) == 1
