"""Checkpoints appear whole or not at all, and the good ones stay."""

import errno
import io
import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from recipes.comparison.events import read_curves
from recipes.config.recipe import FSDP
from recipes.engines.checkpoints import files as checkpoint_files
from recipes.engines.checkpoints.files import CheckpointFiles, end_if_asked, whole
from recipes.engines.logs.loggers import RunLoggers, tensorboard
from recipes.engines.resuming import remove_halves
from recipes.training.checkpoint_names import KINDS, newest_of_all, newest_of_each
from recipes.training.clock import Clock
from recipes.training.stop import StartAgain
from tests.disks import fill, on_disk_before_named, read_only, small_disk, small_files
from tests.recipes.engines.lightning.test_checkpoints import new_checkpoints, save_at
from tests.recipes.training.fake_run import FakeRun


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left"),
        RuntimeError("[enforce fail at inline_container.cc:1] . failed"),
        # Of another rank, as the collective calls of torch.distributed.checkpoint raise it on all; it is no Exception.
        CheckpointException("write", {1: _wrap_exception(OSError(errno.ENOSPC, "No space left"))}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_leaves_what_was_there_and_costs_one_line(tmp_path, error):
    with whole(tmp_path / "ep0-ba1.ckpt") as partial:
        partial.write_text("old")
    with (
        pytest.raises(ValueError, match=r"checkpoints: .*ep0-ba1.ckpt could not be written .*; make room") as raised,
        whole(tmp_path / "ep0-ba1.ckpt") as partial,
    ):
        partial.write_text("half")
        raise error
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == ["ep0-ba1.ckpt"] and (tmp_path / "ep0-ba1.ckpt").read_text() == "old"


def test_a_real_full_disk(tmp_path, monkeypatch):
    """/dev/full refuses each byte."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=1)
    save_at(checkpoints, run, 1)
    save = torch.save

    def refuse(value, file):
        save(value, file if isinstance(file, io.BytesIO) else io.FileIO("/dev/full", "w"))

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(ValueError, match="could not be written .No space left on device.; make room"):
        save_at(checkpoints, run, 2)
    assert names(tmp_path / "checkpoints") == ["ep0-ba1.ckpt", "latest"]


SHARDED = FSDP(checkpoints="sharded")


@pytest.mark.parametrize("fsdp", [None, SHARDED], ids=["full", "sharded"])
def test_a_real_small_disk_and_then_room(tmp_path, fsdp):
    with small_disk(tmp_path / "run") as output:
        checkpoints, run, _ = new_checkpoints(output, keep=2, fsdp=fsdp)
        save_at(checkpoints, run, 1)
        before = sorted(output.rglob("*"))
        for room in (0, 8192):
            filler = fill(output, room)
            with pytest.raises(ValueError, match=r"checkpoints: .*ep0-ba2.* could not be written .*; make room"):
                save_at(checkpoints, run, 2)
            filler.unlink()
            assert sorted(output.rglob("*")) == before
        read_only(output)
        with pytest.raises(ValueError, match=r"ep0-ba2.* not be written .Read-only file system.; check per"):
            save_at(checkpoints, run, 2)
        read_only(output, False)
        again, run, _ = new_checkpoints(output, keep=2, fsdp=fsdp, autoresume=True)
        assert run.counts.batch == 1
        again.load()
        save_at(again, run, 2)
        assert len(names(output / "checkpoints")) == 3


def test_a_sharded_checkpoint_that_cannot_be_written(tmp_path):
    """As above, but where no file system may be mounted, too."""
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=2, fsdp=SHARDED)
    save_at(checkpoints, run, 1)
    with small_files(200), pytest.raises(ValueError, match=r"ep0-ba2 could not be written .File too large."):
        save_at(checkpoints, run, 2)
    assert names(tmp_path / "checkpoints") == ["ep0-ba1", "latest"]


@pytest.mark.parametrize("fsdp", [None, SHARDED], ids=["full", "sharded"])
def test_a_checkpoint_is_on_the_disk_before_older_ones_are_removed(tmp_path, monkeypatch, fsdp):
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=1, fsdp=fsdp)
    before = on_disk_before_named(monkeypatch)
    save_at(checkpoints, run, 1)
    (new,) = (tmp_path / "checkpoints").glob("ep*")
    partial = new.with_name(f".partial.{new.name}")
    assert before[str(partial)] >= {str(partial / path.relative_to(new)) for path in (new, *new.rglob("*"))}
    save_at(checkpoints, run, 1)  # as a run that begins anew in the same folder
    assert names(new.parent) == [new.name, "latest"]
    assert (str(new) in before) == (fsdp is not None)  # it is put aside, and removed when the other one has its name


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    """What they leave does not get into the next checkpoint of that name."""
    with pytest.raises(RuntimeError, match="a bug"), whole(tmp_path / "ep0-ba1") as partial:
        partial.mkdir()
        (partial / "__1_0.distcp").touch()
        raise RuntimeError("a bug")
    with whole(tmp_path / "ep0-ba1") as partial:
        partial.mkdir()
    assert names(tmp_path) == ["ep0-ba1"] and not names(tmp_path / "ep0-ba1")


def test_a_kill_leaves_no_part_of_an_old_checkpoint(tmp_path, monkeypatch):
    """Without `rest.pt`, a sharded one of Lightning would count as one of Composer, and stay for ever."""
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=1, fsdp=SHARDED)
    save_at(checkpoints, run, 1)

    def killed(path):
        (path / "rest.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        save_at(checkpoints, run, 2)
    assert newest_of_each(tmp_path / "checkpoints") == [tmp_path / "checkpoints" / "ep0-ba2"]
    remove_halves(tmp_path)
    assert names(tmp_path / "checkpoints") == ["ep0-ba2", "latest"]


def test_a_run_that_begins_anew_keeps_its_own_checkpoint(tmp_path):
    """Not that of a later batch in its place, which a run before has left."""
    files = CheckpointFiles(tmp_path, KINDS["lightning"], keep=1)
    for batch in (10, 2, 4):
        (tmp_path / f"ep0-ba{batch}.ckpt").touch()
        files.newest_is(tmp_path / f"ep0-ba{batch}.ckpt", batch)
    assert names(tmp_path) == ["ep0-ba10.ckpt", "ep0-ba4.ckpt", "latest"]


def test_what_users_put_beside_checkpoints_is_none(tmp_path):
    """Nor removed with the older ones, nor taken for the newest one."""
    users = ["ep0-ba1", "ep0-ba1-mine.ckpt", "ep0-ba9.ckpt.part"]
    for name in ("ep0-ba1.ckpt", "ep0-ba2.ckpt", *users):
        (tmp_path / name).touch()
    (tmp_path / "ep0-ba1-mine").mkdir()
    (tmp_path / "ep0-ba1-mine" / "rest.pt").touch()
    files = CheckpointFiles(tmp_path, KINDS["lightning"], keep=1)
    assert KINDS["lightning"].newest(tmp_path).name == "ep0-ba2.ckpt"
    files.newest_is(tmp_path / "ep0-ba2.ckpt", 2)
    assert names(tmp_path) == sorted(["ep0-ba2.ckpt", "latest", "ep0-ba1-mine", *users])


def test_what_the_link_points_to_has_its_record(tmp_path, monkeypatch):
    """A start that is killed later writes another record into the run's folder, which is not that of this one."""
    files = CheckpointFiles(tmp_path / "checkpoints", KINDS["lightning"], keep=1)
    (tmp_path / "config.yaml").write_text("a: 1")
    pointed = []
    monkeypatch.setattr(
        checkpoint_files, "point_to", lambda link, path: pointed.append((tmp_path / "records/ep0-ba2").is_dir())
    )
    files.newest_is(tmp_path / "checkpoints" / "ep0-ba2.ckpt", 2)
    assert pointed == [True] and (tmp_path / "records" / "ep0-ba2" / "config.yaml").read_text() == "a: 1"


def test_the_figures_of_batches_before_a_checkpoint_are_on_the_disk(tmp_path):
    """A run that is killed later goes on from it and does not log them again; the validation of its batch, for one."""
    loggers = RunLoggers([tensorboard("run", str(tmp_path))])
    files = CheckpointFiles(tmp_path / "checkpoints", KINDS["lightning"], keep=1, loggers=loggers)
    (tmp_path / "checkpoints").mkdir()
    for batch in (1, 2, 3):
        loggers.log({"loss": 1.0}, batch)
        if batch == 2:
            files.newest_is(tmp_path / "checkpoints" / "ep0-ba2.ckpt", batch)
    assert read_curves(tmp_path / "tensorboard")["loss"].batches.tolist() == [1, 2]
    loggers.close("FINISHED")


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_record_of_it(tmp_path, monkeypatch):
    """Its files, which may be large, go last; the next start removes them."""
    folder, records = tmp_path / "checkpoints", tmp_path / "records"
    for path in (folder, records / "ep0-ba2"):
        path.mkdir(parents=True)
    files = CheckpointFiles(folder, KINDS["lightning"], keep=1)
    for name in ("ep0-ba2.ckpt", "ep0-ba4.ckpt"):
        (folder / name).touch()
    removes = checkpoint_files.remove

    def killed(path):
        if path.parent == folder:
            raise KeyboardInterrupt
        removes(path)

    monkeypatch.setattr(checkpoint_files, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        files.newest_is(folder / "ep0-ba4.ckpt", 4)
    assert not (records / "ep0-ba2").exists()
    remove_halves(tmp_path)
    assert names(folder) == ["ep0-ba4.ckpt", "latest"]


def test_a_copy_that_is_held_begins_later(tmp_path, monkeypatch):
    """The one before is complete before its checkpoint is removed."""
    done = []

    class Copies:
        def __init__(self, address):
            """Of a bucket."""

        def begin(self, path, link, keep):
            done.append(f"begins {path.name}")

        def wait(self):
            done.append(f"waits, there are {names(tmp_path)}")

    monkeypatch.setattr(checkpoint_files, "CheckpointCopies", Copies)
    files = CheckpointFiles(tmp_path, KINDS["lightning"], keep=1, bucket="s3://sets/run")
    (tmp_path / "ep0-ba2.ckpt").touch()
    files.newest_is(tmp_path / "ep0-ba2.ckpt", 2)
    files.hold_copies()
    (tmp_path / "ep0-ba4.ckpt").touch()
    files.newest_is(tmp_path / "ep0-ba4.ckpt", 4)
    assert done == ["begins ep0-ba2.ckpt", "waits, there are ['ep0-ba2.ckpt', 'ep0-ba4.ckpt', 'latest']"]
    assert names(tmp_path) == ["ep0-ba4.ckpt", "latest"]
    files.newest_is(tmp_path / "ep0-ba4.ckpt", 4)
    files.copy_held()
    assert done[-1] == "begins ep0-ba4.ckpt" and sum(line.startswith("begins") for line in done) == 2
    (tmp_path / "ep0-ba6.ckpt").touch()
    files.newest_is(tmp_path / "ep0-ba6.ckpt", 6)
    assert done[-1] == "begins ep0-ba6.ckpt"


@pytest.mark.parametrize("dangles", [False, True])
def test_a_lost_link_is_mended(tmp_path, dangles):
    files = CheckpointFiles(tmp_path, KINDS["lightning"], keep=1)
    if dangles:
        (tmp_path / "latest").symlink_to("ep0-ba11.ckpt")  # which somebody has removed
    for batch in (2, 10, 9):
        (tmp_path / f"ep0-ba{batch}.ckpt").touch()
    KINDS["lightning"].mend(tmp_path)
    assert names(tmp_path) == ["ep0-ba10.ckpt", "ep0-ba2.ckpt", "ep0-ba9.ckpt", "latest"]
    assert (tmp_path / "latest").resolve().name == "ep0-ba10.ckpt"
    files.newest_is(tmp_path / "ep0-ba9.ckpt", 9)  # a run that goes on from 2; the later one is not its own
    assert names(tmp_path) == ["ep0-ba10.ckpt", "ep0-ba9.ckpt", "latest"]
    files.newest_is(tmp_path / "ep0-ba10.ckpt", 10)
    assert names(tmp_path) == ["ep0-ba10.ckpt", "latest"]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("epochs", [(1, 2), (9, 10)])
def test_of_two_checkpoints_of_a_batch_that_of_the_later_epoch_is_the_newest(tmp_path, monkeypatch, epochs, backwards):
    """One was saved at a signal in the last batch of an epoch, and the other one when the run went on with its end."""
    both = [tmp_path / f"ep{epoch}-ba9.ckpt" for epoch in epochs]
    for path in both:
        path.touch()
    listed = both[::-1] if backwards else both  # folders list files in any order
    monkeypatch.setattr(type(tmp_path), "glob", lambda folder, pattern: iter(listed))
    CheckpointFiles(tmp_path, KINDS["lightning"], keep=1).newest_is(both[1], 9)
    assert names(tmp_path) == [both[1].name, "latest"]


def test_the_newest_of_both_engines_is_that_of_the_last_batch(tmp_path):
    """And not the last one by name."""
    for name in ("ep0-ba9.ckpt", "ep0-ba10-rank0.pt"):
        (tmp_path / name).touch()
    assert newest_of_all(tmp_path).name == "ep0-ba10-rank0.pt"


def test_a_link_that_is_there_stays(tmp_path):
    for batch in (4, 6):
        (tmp_path / f"ep0-ba{batch}.ckpt").touch()
    (tmp_path / "latest").symlink_to("ep0-ba4.ckpt")
    KINDS["lightning"].mend(tmp_path)
    assert (tmp_path / "latest").resolve().name == "ep0-ba4.ckpt"


@pytest.mark.parametrize("bad", ["a weight", "the last loss"])
def test_nothing_that_is_not_finite_takes_the_place_of_a_good_checkpoint(tmp_path, bad, capsys):
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=1)
    save_at(checkpoints, run, 1)
    with torch.no_grad():
        if bad == "a weight":
            run.task.weight[0, 0] = float("nan")
        else:
            run.nonfinite = 1
    save_at(checkpoints, run, 2)
    assert names(tmp_path / "checkpoints") == ["ep0-ba1.ckpt", "latest"]
    assert "batch 2 is not finite; the checkpoints before it stay" in capsys.readouterr().out


def test_a_run_ends_after_the_batch_of_a_signal_unless_it_is_the_last():
    run, saved = FakeRun(duration="3ba"), []
    run.at(1)
    end_if_asked(run, lambda: saved.append(1))
    run.stopping = True
    with pytest.raises(StartAgain):
        end_if_asked(run, lambda: saved.append(2))
    with pytest.raises(StartAgain):
        end_if_asked(run, None)
    end_if_asked(run.at(3), lambda: saved.append(3))
    assert saved == [2]
    run.clock = Clock(6, 48, 1, "2ep", epoch_batches=3, epoch_began=3)  # whose epoch is not counted yet
    end_if_asked(run, lambda: saved.append(6))
    run.clock = Clock(3, 24, 0, "2ep", epoch_batches=3, epoch_began=0)
    with pytest.raises(StartAgain):
        end_if_asked(run, lambda: saved.append(3))
    assert saved == [2, 3]


@pytest.mark.parametrize(
    ("nonfinite", "said"),
    [(0, "start the same command again, and it goes on from there"), (2, "not finite and was not saved; the same")],
)
def test_a_run_that_is_stopped_says_whether_it_was_saved(nonfinite, said, capsys):
    run = FakeRun(duration="3ba").at(1)
    run.nonfinite, run.stopping = nonfinite, True
    with pytest.raises(StartAgain):
        end_if_asked(run, lambda: None)
    assert said in capsys.readouterr().out
