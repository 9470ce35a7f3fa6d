"""Runs that are killed, or fail, while a checkpoint is on its way to a bucket; and that start again elsewhere."""

import json
import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes import train
from recipes.config.recipe import to_yaml
from recipes.engines.checkpoints import copies as checkpoint_copies
from recipes.engines.checkpoints import fetched as fetched_checkpoints
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.conversion import from_composer, read_composer
from recipes.engines.checkpoints.copies import CheckpointCopies
from recipes.engines.resuming import prepare_folder
from recipes.training import ranks, run_lock
from tests.data.remote.bucket import serve
from tests.ranks import launch
from tests.recipes.engines.lightning.test_checkpoints import same

WIDE = "model.denoiser={name: dit, width: 128, layers: 2, heads: 2, text_width: 16}"  # checkpoints of two parts


@pytest.fixture
def bucket(monkeypatch):
    with serve(monkeypatch) as bucket:
        yield bucket


@pytest.fixture
def start(bucket, quick_recipe, tmp_path):
    """(name, where, changes) -> the exit status of a run in the folder of this name.

    It is killed when an object arrives for which `where` says so, and that object is lost.
    """
    recipe = quick_recipe(
        tmp_path / "none",
        WIDE,
        "evals.val=null",
        "training.duration=8ba",
        "checkpoints={every: 2ba, keep: 2, autoresume: true, bucket: 's3://sets/run'}",
        "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 3ba}",
    )
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))

    def run(name, where, *changes):
        def lost(arriving, part):
            found = where(arriving.removeprefix("run/"), part)
            if found:
                os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
            return found

        bucket.lost = lost
        script = Path(__file__).with_name("uploading.py")
        arguments = (tmp_path / "process", tmp_path / "recipe.yaml", f"output={tmp_path / name}", *changes)
        done = launch(1, script, *arguments)
        bucket.lost = None
        print(done.stdout[-2000:], done.stderr[-4000:])
        return done.returncode

    return run


def newest(bucket, run):
    """The checkpoint that the bucket names, all of which is there."""
    latest = json.loads(bucket.client.get_object(Bucket="sets", Key="run/latest.json")["Body"].read())
    name = latest["checkpoint"]
    body = bucket.client.get_object(Bucket="sets", Key=f"run/{name}")["Body"].read()
    assert body == (run / "checkpoints" / name).read_bytes()
    return name


def final(run):
    state = from_composer(read_composer(run / "checkpoints" / "latest-rank0.pt"))
    assert state["counts"]["batch"] == 8 and state["levers"]["ScheduledEMA"]["average"]
    return state


def test_a_run_that_is_killed_while_it_copies_goes_on_elsewhere(bucket, start, tmp_path):
    """Between two parts of a checkpoint, and between a checkpoint and its name. It ends with the same bits as one that
    was left alone, and nothing stays in the bucket that is not whole."""
    assert start("alone", lambda *_: False, "checkpoints.bucket=null") == 0
    assert not bucket.names("run")

    assert start("first", lambda name, part: (name, part) == ("ep0-ba4-rank0.pt", 2)) == -signal.SIGKILL
    assert newest(bucket, tmp_path / "first") == "ep0-ba2-rank0.pt"
    assert bucket.unfinished("run") == ["run/ep0-ba4-rank0.pt"]
    assert set(bucket.names("run")) == {"latest.json", "ep0-ba2-rank0.pt"}

    def name_of_batch_6(name, part):
        return name == "latest.json" and "ep1-ba6-rank0.pt" in bucket.names("run")

    assert start("second", name_of_batch_6) == -signal.SIGKILL
    # It may have trained to the end meanwhile.
    written = {file.name for file in (tmp_path / "second" / "checkpoints").glob("ep*")}
    assert {"ep0-ba4-rank0.pt", "ep1-ba6-rank0.pt"} <= written
    assert newest(bucket, tmp_path / "second") == "ep0-ba4-rank0.pt"
    assert not bucket.unfinished("run")

    assert start("third", lambda *_: False) == 0
    assert same(final(tmp_path / "alone"), final(tmp_path / "third"))
    assert newest(bucket, tmp_path / "third") == "ep1-ba8-rank0.pt"
    assert set(bucket.names("run")) == {"latest.json", "ep1-ba6-rank0.pt", "ep1-ba8-rank0.pt"}
    assert not bucket.unfinished("run")


@pytest.mark.parametrize(
    ("error", "ends", "reason"),
    [("a fault", RuntimeError, "RuntimeError a fault; "), ("Connection closed by peer", SystemExit, "")],
)
def test_an_error_ends_a_run_when_its_copy_has_ended(bucket, quick_recipe, tmp_path, monkeypatch, error, ends, reason):
    """Its folder stays locked till then, and the watchdog may report before."""
    said, lines, address = threading.Event(), [], f"s3://sets/{ends.__name__}"
    monkeypatch.setattr(checkpoint_copies.log, "info", lambda line: lines.append(line) or said.set())
    path = tmp_path / "run" / "checkpoints" / "ep0-ba2.ckpt"
    path.parent.mkdir(parents=True)
    path.touch()
    for folder, text in (("records/ep0-ba2", "its own"), (".", "of a later start")):
        (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / folder / "config.yaml").write_text(text)
    (tmp_path / "recipe.yaml").write_text(to_yaml(quick_recipe(tmp_path / "run", "training.engine=lightning")))

    @contextmanager
    def lock(*_):
        try:
            yield
        finally:
            lines.append(set(bucket.names(ends.__name__)))

    def fail(recipe):
        lines.append({"watchdog", "stop-signals"} - {thread.name for thread in threading.enumerate()})
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        CheckpointCopies(address).begin(path, "latest", keep=1)
        raise RuntimeError(error)

    monkeypatch.setattr(run_lock, "held", lock)
    monkeypatch.setattr("recipes.engines.lightning.trainer.train", fail)
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", str(tmp_path / "recipe.yaml")])
    bucket.lost = lambda name, part: not said.wait(60)
    try:
        with pytest.raises(ends):
            train.main()
    finally:
        bucket.lost = None
    ended = f"checkpoints: {reason}the run ends when ep0-ba2.ckpt is copied"
    assert lines == [set(), ended, {"ep0-ba2.ckpt", "latest.json"}]
    assert Bucket(address).latest()["record"] == {"config.yaml": "its own"}


def test_where_all_checkpoints_are_kept_none_is_removed(bucket, tmp_path):
    """They all were, but the new one, when latest.json had been removed, as the line about a damaged one advises. What
    stays of a copy that was broken off needs no permission to remove objects."""

    def push(batch):
        path = tmp_path / f"ep0-ba{batch}.ckpt"
        path.write_text(f"of {batch}")
        Bucket("s3://sets/all").push(path, "latest", keep=-1, record={})

    push(2)
    push(4)
    bucket.client.put_object(Bucket="sets", Key="all/ep0-ba5/__0_0.distcp", Body=b"half")
    bucket.client.delete_object(Bucket="sets", Key="all/latest.json")
    bucket.removes = False
    push(6)
    whole = {f"ep0-ba{batch}.ckpt" for batch in (2, 4, 6)}
    assert set(bucket.names("all")) == {"latest.json", "ep0-ba5/__0_0.distcp", *whole}


def test_a_folder_of_the_same_name_of_another_run_is_never_mixed_with_a_new_one(bucket, tmp_path):
    """A run that begins anew (`checkpoints.autoresume: false`), with fewer ranks and under the other engine, copies its
    first checkpoint over the newest one of the run before."""
    copies = Bucket("s3://sets/anew")
    for run, names in (
        ("before", [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "rest.pt"]),
        ("now", [".metadata", "__0_0.distcp", "__1_0.distcp"]),
    ):
        (tmp_path / run / "ep0-ba4").mkdir(parents=True)
        for name in names:
            (tmp_path / run / "ep0-ba4" / name).write_text(run)
    copies.push(tmp_path / "before" / "ep0-ba4", "latest", keep=2, record={})
    bucket.refused = "__1_0.distcp"  # so the copy ends after two of three files
    with pytest.raises(ValueError, match="ep0-ba4: cannot be written"):
        copies.push(tmp_path / "now" / "ep0-ba4", "latest-rank0.pt", keep=2, record={})
    assert copies.latest() is None
    bucket.refused = None
    copies.push(tmp_path / "now" / "ep0-ba4", "latest-rank0.pt", keep=2, record={})
    copies.fetch("ep0-ba4", tmp_path / "fetched")
    fetched = {file.name: file.read_text() for file in (tmp_path / "fetched").iterdir()}
    assert fetched == dict.fromkeys([".metadata", "__0_0.distcp", "__1_0.distcp"], "now")


@pytest.mark.parametrize("step", ["fetch", "point_to"])
def test_a_fetch_that_ends_before_its_link_has_the_record(bucket, quick_recipe, tmp_path, monkeypatch, step):
    """The next start takes the checkpoint for the run's own, and asks the bucket for no record of it."""
    address = "s3://sets/recorded"
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=true", f"checkpoints.bucket={address}")
    (tmp_path / "ep0-ba2.ckpt").write_text("a checkpoint")
    texts = {"config.yaml": to_yaml(recipe), "tracked.txt": "a run of a logger"}
    Bucket(address).push(tmp_path / "ep0-ba2.ckpt", "latest", keep=1, record=texts)
    where = Bucket if step == "fetch" else fetched_checkpoints
    act = getattr(where, step)

    def killed(*arguments):
        if step == "fetch":
            act(*arguments)
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(where, step, killed)
        prepare_folder(recipe, "lightning")
    prepare_folder(recipe, "lightning")
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "ep0-ba2.ckpt"
    record = tmp_path / "run" / "records" / "ep0-ba2"
    assert {file.name: file.read_text() for file in record.iterdir()} == texts
