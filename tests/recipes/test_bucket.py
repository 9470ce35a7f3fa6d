"""From tars in a bucket to a run that goes on from a checkpoint in the bucket; and buckets that fail."""

import importlib
import os
import re
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from benchmarks.killing import fork
from data.encoded.sets import remote_set
from data.loading import Placement
from data.remote import downloads
from data.sources.tars import TarSource
from data.system.files import point_to
from precompute.encoding.pipeline import EncodePipeline
from precompute.output.upload import MARKER
from recipes.config.components import COMPONENTS
from recipes.config.values import Component
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.copies import CheckpointCopies
from recipes.engines.checkpoints.fetched import fetch_newest
from recipes.training.callback import Callback
from recipes.training.checkpoint_names import newest_of_all
from tests.data.remote.bucket import serve
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
def job(bucket, drawings, latent_sets, tmp_path_factory) -> Path:
    """The YAML of a job that encodes tars in the bucket, in small shards, and uploads them to s3://sets/latents."""
    bucket.upload(drawings, "tars")
    out = tmp_path_factory.mktemp("from_bucket")
    values = yaml.safe_load((latent_sets.parent / "encode.yaml").read_text())
    values |= {"out": str(out / "set"), "size_limit": "6kb", "resolutions": [16], "upload": "s3://sets/latents"}
    values["sources"] = {"train": {"name": "tars", "urls": "s3://sets/tars/train/{00000..00003}.tar"}}
    (out / "encode.yaml").write_text(yaml.safe_dump(values))
    return out / "encode.yaml"


@pytest.fixture(scope="module")
def encoded(bucket, job) -> Path:
    """The set that two ranks have encoded; also at s3://sets/latents/train. They end while shards are uploaded."""
    from precompute.encode import main

    publish = EncodePipeline._publish

    def until_one_is_uploaded(*arguments):
        publish(*arguments)
        end = time.monotonic() + 60
        while not bucket.names("latents/train") and time.monotonic() < end:
            time.sleep(0.01)

    for rank in ("1", "0"):  # they share nothing but the folder, so they may run after each other
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", rank)
            patch.setenv("WORLD_SIZE", "2")
            patch.setattr(EncodePipeline, "_publish", until_one_is_uploaded)
            patch.setattr(bucket, "seconds", 0.05)
            assert not names_in(bucket, "latents/train/manifest.json")
            main([str(job)])
    return job.parent / "set" / "train"


def names_in(bucket, prefix):
    """Names and sizes of the files below a folder of the bucket."""
    pages = bucket.client.get_paginator("list_objects_v2").paginate(Bucket="sets", Prefix=prefix)
    return {entry["Key"].removeprefix(prefix): entry["Size"] for page in pages for entry in page.get("Contents", ())}


def files_in(folder):
    """Names and sizes of the files of a set, without the notes of where its copy is."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def test_ranks_upload_what_they_finish(bucket, encoded):
    assert names_in(bucket, "latents/train/") == files_in(encoded)
    assert len(list(encoded.rglob("*.mds"))) >= SHARDS
    manifest = bucket.client.get_object(Bucket="sets", Key="latents/train/manifest.json")["Body"].read()
    assert manifest == (encoded / "manifest.json").read_bytes()


def test_a_copy_that_a_bucket_refused_is_made_at_the_next_start(bucket, job, encoded, capsys):
    from precompute.encode import main

    times = [path.stat().st_mtime_ns for path in sorted(encoded.rglob("*.mds"))]
    bucket.refused = ""  # all names end so
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(job), "upload=s3://sets/second/"])
    finally:
        bucket.refused = None
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "start the job again" in error
    assert "upload: s3://sets/second/train/shards/" in error
    assert not names_in(bucket, "second")
    main([str(job), "upload=s3://sets/second/"])
    assert names_in(bucket, "second/train/") == files_in(encoded)
    assert [path.stat().st_mtime_ns for path in sorted(encoded.rglob("*.mds"))] == times  # nothing is encoded again


def test_a_set_that_was_made_otherwise_is_not_mixed_with_another(bucket, job, encoded, tmp_path, capsys):
    """Its manifest would stand beside shards of both."""
    from precompute.encode import main

    with pytest.raises(SystemExit) as ended:
        main([str(job), f"out={tmp_path}", "upscale=true"])
    refusal = "upload: s3://sets/latents/train: holds values made with upscale False, this job has True; give another"
    assert ended.value.code == 2 and refusal in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.mds"))  # nothing is encoded, or uploaded


EMA = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}"
RUN = ["data.resolution=16", "training.duration=8ba", EMA]


@pytest.fixture(scope="module")
def whole(bucket, encoded, quick_recipe, tmp_path_factory):
    """A run that reads the set from the bucket, with a cache that is too small for it: (folder, what was recorded)."""
    folder = tmp_path_factory.mktemp("whole")
    shards = list(encoded.rglob("*.mds"))
    assert len(shards) >= SHARDS
    largest = max(path.stat().st_size for path in shards)
    limit = 4 * largest + (encoded / "index.json").stat().st_size
    own = [*RUN, "checkpoints={every: 3ba, keep: -1}", f"data.cache_limit={limit}", "data.predownload=8"]
    remote = quick_recipe(folder, *own)
    arguments = {"url": "s3://sets/latents/train", "cache": str(folder / "cache")}
    stream = Component("stream", "remote", arguments, COMPONENTS["stream"]["remote"], "data.streams.train")
    remote.data.args["streams"] = {"train": stream}
    recorded = record("composer", remote)
    cached = sum(path.stat().st_size for path in (folder / "cache").rglob("*.mds"))
    # The threads that fetch shards make room before they begin, and count them when they have ended.
    assert cached <= limit + 2 * largest < sum(path.stat().st_size for path in shards)
    return folder, recorded


def test_tars_to_training_to_a_resumed_run(bucket, encoded, whole, quick_recipe, tmp_path):
    """The resumed run, which loads its checkpoint from the bucket and its data from a disk, has the same bits."""
    (checkpoint,) = (whole[0] / "checkpoints").glob("*-ba3-*")
    bucket.upload(checkpoint.parent, "checkpoints")
    again = [
        f"data.streams.train.path={encoded}",
        f"checkpoints.load_path=s3://sets/checkpoints/{checkpoint.name}",
    ]
    resumed = record("composer", quick_recipe(tmp_path / "again", *RUN, *again))
    assert len(resumed.losses) == 5
    assert_bit_equal(whole[1], resumed)


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_checkpoints_in_a_bucket(bucket, encoded, whole, quick_recipe, tmp_path, capsys, engine):
    """Training goes on while a checkpoint is copied and after a copy that is refused. A run whose last copies are
    refused goes on elsewhere from the one before, and has the same bits; started again, it copies the last one."""

    def recipe(name, *changes):
        checkpoints = f"checkpoints={{every: 3ba, keep: 2, autoresume: true, bucket: 's3://sets/{engine}/run'}}"
        data = f"data.streams.train.path={encoded}"
        return quick_recipe(tmp_path / name, *RUN, data, checkpoints, *changes)

    suffix = "-rank0.pt" if engine == "composer" else ".ckpt"
    faults = Faults(bucket)
    trainers = importlib.import_module(f"recipes.engines.{engine}.trainer")
    trainer = trainers.build_trainer(recipe("lost"), lambda parts: parts.callbacks.update(faults=faults))
    bucket.lost = faults.arrives
    try:
        with pytest.raises(ValueError, match="checkpoints.bucket: .*-ba8.*") as error:  # and why, unless it was said
            trainer.fit()
            trainer.close()
    finally:
        bucket.refused = bucket.lost = None
    assert faults.trained_on == [True] and faults.batches == 8
    assert "\n" not in str(error.value)
    warning = rf"ep1-ba6{suffix}: cannot be written .*; the checkpoint stays on the disk, and the next one is copied"
    assert re.search(warning, capsys.readouterr().out)
    # All of the last two checkpoints is there, but nothing names it.
    names = {f"ep0-ba3{suffix}", f"ep1-ba6{suffix}", f"ep1-ba8{suffix}"}
    assert set(bucket.names(f"{engine}/run")) == {"latest.json", *names}
    with pytest.raises(ValueError, match="optimizer.lr was 0.002, is 0.1"):
        trainers.build_trainer(recipe("changed", "optimizer.lr=0.1"))
    resumed = record(engine, recipe("again"))
    assert len(resumed.losses) == 5
    assert_bit_equal(whole[1], resumed)
    assert set(bucket.names(f"{engine}/run")) == {"latest.json", f"ep1-ba6{suffix}", f"ep1-ba8{suffix}"}
    if engine == "lightning":
        trainer = trainers.build_trainer(
            recipe("loaded", f"checkpoints.load_path=s3://sets/{engine}/run/ep1-ba6{suffix}", "checkpoints.bucket=null")
        )
        assert trainer.run.counts.batch == 6
    for name in bucket.names(f"{engine}/run"):
        bucket.client.delete_object(Bucket="sets", Key=f"{engine}/run/{name}")
    trainers.train(recipe("lost"))
    assert set(bucket.names(f"{engine}/run")) == {"latest.json", f"ep1-ba8{suffix}"}


class Faults(Callback):
    """The first checkpoint arrives only when the run has trained two more batches. The bucket takes the objects of the
    later ones, but does not let their names be written."""

    def __init__(self, bucket):
        self.bucket = bucket
        self.batches, self.trained_on = 0, []
        self.past = threading.Event()

    def arrives(self, name, part):
        if "-ba3" in name:
            self.trained_on.append(self.past.wait(60))
        if "-ba6" in name:
            self.bucket.refused = "latest.json"
        return False

    def step_end(self, run):
        self.batches = run.clock.batch
        if self.batches == 5:
            self.past.set()


def test_a_sharded_checkpoint_is_copied_as_a_folder(bucket, tmp_path):
    """Those before it are removed, and not later ones; an older folder gets what it lacks, a newer one nothing."""
    copies = Bucket("s3://sets/folders/")
    fetch_newest(copies, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    checkpoints = tmp_path / "run" / "checkpoints"
    (tmp_path / "run").mkdir()
    for batch in (2, 4, 10):
        path = checkpoints / f"ep0-ba{batch}"
        path.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            (path / name).write_text(f"{name} of {batch}")
        if batch == 10:  # a copy that was broken off
            bucket.client.put_object(Bucket="sets", Key="folders/ep0-ba9/__0_0.distcp", Body=b"half")
            bucket.client.put_object(Bucket="sets", Key="folders/ep0-ba100/__1_0.distcp", Body=b"later")
        copies.push(path, "latest-rank0.pt", keep=1, record={"config.yaml": "a: 1"})
    names = {f"ep0-ba10/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    assert set(bucket.names("folders")) == names | {"ep0-ba100/__1_0.distcp", "latest.json"}
    shutil.rmtree(checkpoints / "ep0-ba10")
    for folder in ("new", "run"):
        (tmp_path / folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        point_to(tmp_path / folder / "checkpoints" / "latest-rank0.pt", checkpoints / "ep0-ba4")
        fetch_newest(copies, tmp_path / folder)
        newest = newest_of_all(tmp_path / folder / "checkpoints")
        assert newest.name == "ep0-ba10" and (newest / "__1_0.distcp").read_text() == "__1_0.distcp of 10"
        assert (tmp_path / folder / "config.yaml").read_text() == "a: 1"
    (newest / ".metadata").write_text("newer")
    fetch_newest(copies, tmp_path / "run")
    assert (newest / ".metadata").read_text() == "newer"
    again = CheckpointCopies("s3://sets/folders")
    again.catch_up(newest, "latest-rank0.pt", keep=1)  # it is there already
    again.finish()
    copied = bucket.client.get_object(Bucket="sets", Key="folders/ep0-ba10/.metadata")
    assert copied["Body"].read() == b".metadata of 10"


@pytest.mark.parametrize("failed", ["before the end", "at the end", "both"])
def test_why_the_last_copy_of_a_run_has_failed_is_said_once(bucket, tmp_path, monkeypatch, capsys, failed):
    """Also where the one before has failed, whose line says nothing of it."""
    checkpoint = tmp_path / "checkpoints" / "ep0-ba2.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("a checkpoint")
    copies = CheckpointCopies("s3://sets/last")
    do = copies._process.do

    def at_the_end(task):
        while not copies._is_last:
            time.sleep(0.01)
        do(task)

    bucket.refused = ""  # all names end so
    try:
        if failed != "at the end":
            copies.begin(checkpoint, "latest", keep=1)
            assert "credential has expired" in str(copies.wait())
        if failed != "before the end":
            monkeypatch.setattr(copies._process, "do", at_the_end)
            copies.begin(checkpoint, "latest", keep=1)
        with pytest.raises(ValueError, match="ep0-ba2.ckpt") as error:
            copies.finish()
    finally:
        bucket.refused = None
    assert type(error.value) is ValueError  # and no `Outage`, as the store has refused it
    assert str(error.value).endswith("start the same command again, which copies it")
    assert capsys.readouterr().out.count("cannot be written") == (failed != "at the end")
    assert str(error.value).count("cannot be written") == (failed != "before the end")


def test_a_run_that_is_killed_while_it_copies_leaves_nothing(bucket, tmp_path, monkeypatch):
    """By a real SIGKILL between two parts of a file. The next start has a whole checkpoint, and copies again."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for batch, size in ((2, 100), (4, 17 << 20), (6, 100)):
        (checkpoints / f"ep0-ba{batch}.ckpt").write_bytes(bytes([batch]) * size)

    def push(batch):
        Bucket("s3://sets/killed").push(checkpoints / f"ep0-ba{batch}.ckpt", "latest", keep=2, record={})

    def copy():
        (tmp_path / "pid").write_text(str(os.getpid()))
        push(4)

    def lost(name, part):
        if part == 2:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        return part == 2

    push(2)
    bucket.lost = lost
    try:
        child = fork(copy, tmp_path / "log.txt", {})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    finally:
        bucket.lost = None
    assert bucket.unfinished("killed") == ["killed/ep0-ba4.ckpt"] and "ep0-ba4.ckpt" not in bucket.names("killed")
    fetch_newest(Bucket("s3://sets/killed"), tmp_path / "again")
    assert newest_of_all(tmp_path / "again" / "checkpoints").read_bytes() == bytes([2]) * 100
    # Of the run's own uploads only those stay that a living process may be at, and all of others.
    others = ["killed/deeper/ep0-ba4.ckpt", "killed/notes.txt", "killed2/ep0-ba4.ckpt"]
    for name in ("killed/ep0-ba3/__0_0.distcp", *others):
        bucket.client.create_multipart_upload(Bucket="sets", Key=name)
    with monkeypatch.context() as patch:
        patch.setattr("data.remote.multipart.OLD", timedelta(days=365 * 100))  # the server says that all began in 2010
        push(4)
    assert bucket.unfinished("killed") == sorted(["killed/ep0-ba3/__0_0.distcp", *others])
    assert set(bucket.names("killed")) == {"latest.json", "ep0-ba2.ckpt", "ep0-ba4.ckpt"}
    push(6)
    push(6)  # its name counts once
    assert bucket.unfinished("killed") == others
    assert set(bucket.names("killed")) == {"latest.json", "ep0-ba4.ckpt", "ep0-ba6.ckpt"}


def read(tmp_path, **arguments):
    """All keys of the set in the bucket, and the number of its batches."""
    from data.latents import latents

    stream = remote_set(url="s3://sets/latents/train", cache=str(tmp_path / "cache"), download_timeout=5.0, **arguments)
    loading = latents(Placement(8, training=True), {}, streams={"train": stream}, resolution=16)
    return sorted(seed for batch in loading.loader for seed in batch["seed"].tolist())


def test_a_bucket_that_is_slow_and_fails_at_times_is_asked_again(bucket, encoded, tmp_path):
    bucket.failing, bucket.seconds = 3, 0.02
    try:
        assert len(set(read(tmp_path))) == 40 and bucket.failing == 0
    finally:
        bucket.seconds = 0.0


def test_a_bucket_that_fails_on_is_one_line(bucket, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "ATTEMPTS", 2)
    bucket.failing = 10**6
    try:
        with pytest.raises(ValueError, match="s3://sets/latents/train/manifest.json: cannot be fetched .*500") as error:
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

    stream = remote_set(url="s3://sets/latents/train", cache=str(tmp_path / "cache"), download_retry=1)
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
    with pytest.raises((FileNotFoundError, ValueError), match="s3://sets/tars/train/00007.tar") as error:
        list(source.read(source.shards()[0]))
    assert "\n" not in str(error.value)
