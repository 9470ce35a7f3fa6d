"""What the start of a run does with the checkpoints in a bucket."""

import os
import random
import signal

import pytest

from benchmarks.killing import fork
from data.remote.stores import S3Store
from data.system.files import point_to
from recipes.config.recipe import to_yaml
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.copies import CheckpointCopies
from recipes.engines.checkpoints.fetched import fetch_newest
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint
from recipes.engines.resuming import prepare_folder, says_what_to_remove
from recipes.training.checkpoint_names import KINDS, newest_of_all
from tests.data.remote.bucket import serve


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch, serve(patch) as bucket:
        yield bucket


@pytest.mark.parametrize("link", ["lost", "broken"])
def test_a_newer_checkpoint_whose_link_is_lost_is_not_replaced_by_an_older_copy(bucket, quick_recipe, tmp_path, link):
    """The run went back to the copy without a word."""
    address = f"s3://sets/unlinked/{link}"
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=true", f"checkpoints.bucket={address}")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "ep0-ba5.ckpt").write_text("the copy")
    Bucket(address).push(checkpoints / "ep0-ba5.ckpt", "latest", keep=1, record={})
    (checkpoints / "ep0-ba5.ckpt").rename(checkpoints / "ep0-ba10.ckpt")
    if link == "broken":
        point_to(checkpoints / "latest", checkpoints / "ep0-ba12.ckpt")
    prepare_folder(recipe, "lightning")
    assert (checkpoints / "latest").resolve().name == "ep0-ba10.ckpt"
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "ep0-ba10.ckpt"}


def test_a_link_to_a_checkpoint_without_a_batch_in_its_name_is_refused(bucket, quick_recipe, tmp_path):
    """A user's own link; it was a TypeError, and, where the bucket was empty, a copy that no start could read."""
    address = "s3://sets/unnumbered/run"
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=true", f"checkpoints.bucket={address}")
    own = tmp_path / "run" / "checkpoints" / "best.ckpt"
    own.parent.mkdir(parents=True)
    own.write_text("the best one")
    point_to(own.with_name("latest"), own)
    with pytest.raises(ValueError, match=r"checkpoints\.bucket: .*best\.ckpt, .*for instance to ep0-ba1000\.ckpt"):
        prepare_folder(recipe, "lightning")
    assert Bucket(address).latest() is None


def test_a_damaged_checkpoint_that_has_a_copy_is_fetched_again_as_its_error_says(bucket, quick_recipe, tmp_path):
    address = "s3://sets/damaged/run"
    changes = ["checkpoints.autoresume=true", "checkpoints.bucket="]
    recipe, alone = (quick_recipe(tmp_path / "run", changes[0], changes[1] + to) for to in (address, "null"))
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    older, newest = checkpoints / "ep0-ba5.ckpt", checkpoints / "ep0-ba10.ckpt"
    older.write_text("older")
    newest.write_text("whole")
    point_to(checkpoints / "latest", newest)
    Bucket(address).push(newest, "latest", keep=2, record={})
    newest.write_text("half")
    kind = KINDS["lightning"]
    said = f"^half; remove {newest}, and the next start fetches its copy from {address}, or with "
    said += f"checkpoints.bucket=null goes on from {older}$"
    with pytest.raises(ValueError, match=said), says_what_to_remove(checkpoints, kind, recipe.checkpoints):
        raise DamagedCheckpoint("half")
    newest.unlink()
    prepare_folder(alone, "lightning")
    assert kind.newest(checkpoints) == older
    prepare_folder(recipe, "lightning")
    assert kind.newest(checkpoints) == newest and newest.read_text() == "whole"


def test_a_copy_has_the_record_with_which_the_checkpoint_was_written(bucket, tmp_path):
    """A start with an allowed change may have written its own into the folder, before it copied what was there."""
    checkpoint, record = tmp_path / "checkpoints" / "ep0-ba2.ckpt", tmp_path / "records" / "ep0-ba2"
    for folder in (checkpoint.parent, record):
        folder.mkdir(parents=True)
    checkpoint.write_text("a checkpoint")
    (tmp_path / "config.yaml").write_text("seed: 2\n")
    (record / "config.yaml").write_text("seed: 1\n")
    copies = CheckpointCopies("s3://sets/recorded/run")
    copies.catch_up(checkpoint, "latest", keep=1)
    assert copies.wait() is None
    assert Bucket("s3://sets/recorded/run").latest()["record"] == {"config.yaml": "seed: 1\n"}
    copies.catch_up(checkpoint.rename(checkpoint.with_name("ep0-ba5.ckpt")), "latest", keep=1)  # newer than its copy
    copies.finish()
    latest = Bucket("s3://sets/recorded/run").latest()
    assert (latest["checkpoint"], latest["record"]) == ("ep0-ba5.ckpt", {"config.yaml": "seed: 2\n"})


def test_a_bucket_with_another_runs_checkpoints_is_refused_before_anything_is_fetched(bucket, quick_recipe, tmp_path):
    """Whether this run has newer ones or none, and its own record stays; an allowed change goes on from there."""
    address = "s3://sets/autoresume/run"
    common = ["checkpoints.autoresume=true", f"checkpoints.bucket={address}"]
    one = quick_recipe(tmp_path / "one", *common)
    checkpoint = tmp_path / "one" / "checkpoints" / "ep0-ba6.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("of one")
    Bucket(address).push(checkpoint, "latest", keep=2, record={"config.yaml": to_yaml(one)})
    for name, batch in (("empty", None), ("older", 4), ("newer", 8)):
        other = quick_recipe(tmp_path / name, *common, "optimizer.lr=0.1")
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(to_yaml(other))
        if batch is not None:
            own = tmp_path / name / "checkpoints" / f"ep0-ba{batch}.ckpt"
            own.parent.mkdir()
            own.write_text("of the other")
            point_to(own.with_name("latest"), own)
        before = sorted(tmp_path.rglob("*"))
        said = f"checkpoints.bucket: the recipe is not the one that {address} was .*give another address"
        with pytest.raises(ValueError, match=said):
            prepare_folder(other, "lightning")
        assert sorted(tmp_path.rglob("*")) == before
    allowed = quick_recipe(tmp_path / "empty", *common, "optimizer.lr=0.1", "checkpoints.allow_changes=[optimizer]")
    for _ in range(2):  # and it stays a change until a checkpoint is written with it
        assert prepare_folder(allowed, "lightning") == ["optimizer.lr"]
    assert newest_of_all(tmp_path / "empty" / "checkpoints").read_text() == "of one"
    assert "lr: 0.1" in (tmp_path / "empty" / "config.yaml").read_text()


def test_a_fetch_that_is_killed_leaves_nothing_for_ever(bucket, quick_recipe, tmp_path, monkeypatch):
    """By a real SIGKILL in the middle of a file."""
    address = "s3://sets/fetched/run"
    (tmp_path / "ep0-ba2.ckpt").write_text("a checkpoint")
    Bucket(address).push(tmp_path / "ep0-ba2.ckpt", "latest", keep=1, record={})
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=true", f"checkpoints.bucket={address}")

    def half(store, name, path):
        path.write_text("a check")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(S3Store, "download", half)
        child = fork(lambda: prepare_folder(recipe, "lightning"), tmp_path / "log.txt", {})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    (left,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert left.name.startswith(".ep0-ba2.ckpt.")
    prepare_folder(recipe, "lightning")
    assert {path.name for path in left.parent.iterdir()} == {"ep0-ba2.ckpt", "latest"}


def test_a_fetch_leaves_the_generator_of_random_numbers_as_it_is(bucket, tmp_path, monkeypatch):
    """Clients draw from it when they wait before they ask again."""
    download = S3Store.download

    def draw(*arguments):
        random.random()
        download(*arguments)

    monkeypatch.setattr(S3Store, "download", draw)
    (tmp_path / "ep0-ba2.ckpt").write_text("a checkpoint")
    copies = Bucket("s3://sets/drawing")
    copies.push(tmp_path / "ep0-ba2.ckpt", "latest", keep=1, record={})
    before = random.getstate()
    copies.fetch("ep0-ba2.ckpt", tmp_path / "fetched")
    assert random.getstate() == before and (tmp_path / "fetched").read_text() == "a checkpoint"


def test_a_bucket_for_checkpoints_that_refuses_is_one_line(bucket, tmp_path):
    bucket.expired = True
    try:
        with pytest.raises(ValueError, match="s3://sets/run/latest.json: cannot be read .*credential has exp") as error:
            fetch_newest(Bucket("s3://sets/run"), tmp_path)
    finally:
        bucket.expired = False
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="s3://sets/run/ep0-ba1.ckpt: cannot be fetched .no such object"):
        Bucket("s3://sets/run").fetch("ep0-ba1.ckpt", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_whether_a_bucket_can_be_written_is_asked_when_a_run_starts(bucket, quick_recipe, tmp_path):
    """A credential that may not remove objects is enough for a run that removes none."""

    def start(keep, address="s3://sets/asked"):
        checkpoints = f"checkpoints={{every: 3ba, keep: {keep}, autoresume: true, bucket: '{address}'}}"
        prepare_folder(quick_recipe(tmp_path / "run", checkpoints), "lightning")

    bucket.removes = False
    try:
        start(-1)
        with pytest.raises(ValueError, match="writable: cannot be removed, which checkpoints.keep: 2 needs .*403"):
            start(2)
        bucket.refused = "writable"
        with pytest.raises(ValueError, match="asked/writable: cannot be written .*403"):
            start(-1)
    finally:
        bucket.removes, bucket.refused = True, None
    start(2)
    assert not bucket.names("asked")
    with pytest.raises(ValueError, match="s3://nowhere/run/writable: cannot be written .*NoSuchBucket"):
        start(2, "s3://nowhere/run")


def test_a_run_that_begins_anew_is_refused_a_bucket_with_checkpoints(bucket, quick_recipe, tmp_path):
    """Its first copies would replace them. If it was killed before, the next start would go on from the earlier run."""
    address = "s3://sets/anew/run"
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=false", f"checkpoints.bucket={address}")
    assert prepare_folder(recipe, "lightning") == []
    (tmp_path / "ep0-ba2.ckpt").write_text("of an earlier run")
    Bucket(address).push(tmp_path / "ep0-ba2.ckpt", "latest", keep=1, record={})
    before = bucket.names("anew")
    with pytest.raises(ValueError, match=f"^checkpoints.bucket: {address} has ep0-ba2.ckpt of an earlier run, .*give"):
        prepare_folder(recipe, "lightning")
    assert bucket.names("anew") == before and len(before) == 2
