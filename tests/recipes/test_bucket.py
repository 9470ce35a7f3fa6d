"""From tars in a bucket to a run that goes on from a checkpoint in the bucket; and buckets that fail."""

import time
from pathlib import Path

import pytest
import yaml

from data import encoded_sets
from data.encoded_sets import remote_set
from data.loading import Placement
from data.sources.tars import TarSource
from recipes.config.components import COMPONENTS
from recipes.config.values import Component
from tests.data.bucket import serve
from tests.recipes.engines.recording import assert_bit_equal, record

SHARDS = 9  # of the set; the cache has room for fewer


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch, serve(patch) as bucket:
        yield bucket


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))


@pytest.fixture(scope="module")
def encoded(bucket, drawings, latent_sets, tmp_path_factory) -> Path:
    """A set that was encoded from tars in the bucket, in small shards; also at s3://sets/latents."""
    from precompute.encode import main

    bucket.upload(drawings, "tars")
    out = tmp_path_factory.mktemp("from_bucket")
    values = yaml.safe_load((latent_sets.parent / "encode.yaml").read_text())
    values |= {"out": str(out), "size_limit": "6kb", "resolutions": [16]}
    values["sources"] = {"train": {"name": "tars", "urls": "s3://sets/tars/train/{00000..00003}.tar"}}
    (out / "encode.yaml").write_text(yaml.safe_dump(values))
    main([str(out / "encode.yaml")])
    bucket.upload(out / "train", "latents")
    return out / "train"


def test_tars_to_training_to_a_resumed_run(bucket, encoded, small_recipe, tmp_path):
    """The resumed run, which loads its checkpoint from the bucket and its data from a disk, has the same bits."""
    shards = list(encoded.rglob("*.mds"))
    assert len(shards) >= SHARDS
    largest = max(path.stat().st_size for path in shards)
    limit = 4 * largest + (encoded / "index.json").stat().st_size
    ema = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}"
    own = ["data.resolution=16", "training.duration=8ba", "checkpoints={every: 3ba, keep: -1}", ema]
    remote = small_recipe(tmp_path / "whole", *own, f"data.cache_limit={limit}", "data.predownload=8")
    arguments = {"url": "s3://sets/latents", "cache": str(tmp_path / "cache")}
    stream = Component("stream", "remote", arguments, COMPONENTS["stream"]["remote"], "data.streams.train")
    remote.data.args["streams"] = {"train": stream}
    whole = record("composer", remote)
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.mds"))
    # The threads that fetch shards make room before they begin, and count them when they have ended.
    assert cached <= limit + 2 * largest < sum(path.stat().st_size for path in shards)
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("*-ba3-*")
    bucket.upload(checkpoint.parent, "checkpoints")
    again = [
        f"data.streams.train.path={encoded}",
        f"checkpoints.load_path=s3://sets/checkpoints/{checkpoint.name}",
    ]
    resumed = record("composer", small_recipe(tmp_path / "again", *own, *again))
    assert len(resumed.losses) == 5
    assert_bit_equal(whole, resumed)


def read(tmp_path, **arguments):
    """All keys of the set in the bucket, and the number of its batches."""
    from data.latents import latents

    stream = remote_set(url="s3://sets/latents", cache=str(tmp_path / "cache"), download_timeout=5.0, **arguments)
    loading = latents(Placement(8, training=True), {}, streams={"train": stream}, resolution=16)
    return sorted(seed for batch in loading.loader for seed in batch["seed"].tolist())


def test_a_bucket_that_is_slow_and_fails_at_times_is_asked_again(bucket, encoded, tmp_path):
    bucket.failing, bucket.seconds = 3, 0.02
    try:
        assert len(set(read(tmp_path))) == 40 and bucket.failing == 0
    finally:
        bucket.seconds = 0.0


def test_a_bucket_that_fails_on_is_one_line(bucket, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_sets, "ATTEMPTS", 2)
    bucket.failing = 10**6
    try:
        with pytest.raises(ValueError, match="s3://sets/latents/manifest.json: cannot be fetched .*500") as error:
            read(tmp_path)
    finally:
        bucket.failing = 0
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob(".manifest*"))  # nothing half-written stays


def test_an_expired_credential_is_one_line_and_is_not_tried_again(bucket, encoded, tmp_path):
    bucket.expired, before = True, bucket.asked
    try:
        with pytest.raises(ValueError, match="manifest.json: cannot be fetched .*the credential has expired") as error:
            read(tmp_path)
        assert "\n" not in str(error.value) and bucket.asked - before <= 4
    finally:
        bucket.expired = False


def test_a_credential_that_expires_later_is_one_line(bucket, encoded, tmp_path):
    from data.latents import latents

    stream = remote_set(url="s3://sets/latents", cache=str(tmp_path / "cache"), download_retry=1)
    loading = latents(Placement(8, training=True), {}, streams={"train": stream}, resolution=16, predownload=1)
    bucket.expired = True
    try:
        with pytest.raises(ValueError, match="data: a shard could not be fetched .*the credential has exp") as error:
            list(loading.loader)
    finally:
        bucket.expired = False
    assert "\n" not in str(error.value)


def test_a_tar_that_is_not_there_is_one_line(bucket, encoded):
    source = TarSource(urls="s3://sets/tars/train/00007.tar")
    with pytest.raises((FileNotFoundError, ConnectionError), match="s3://sets/tars/train/00007.tar") as error:
        list(source.read(source.shards()[0]))
    assert "\n" not in str(error.value)
