"""Ranks that go on with shards of others, and jobs whose number of processes changes while they are killed."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.killing import digests
from data.encoded.manifest import Manifest
from data.system.ranks import Rank
from precompute.encode import main
from precompute.encoding.job import _finish
from precompute.output.claims import LOST, Claims, begun_shards, shards_to_do
from precompute.output.output_set import DONE, STALE, OutputSet
from precompute.output.problems import Problem
from precompute.output.shard_folder import ShardFolder
from tests.precompute.output_sets import ages_when_published
from tests.ranks import launch

ROOT = Path(__file__).parents[3]


def finish(output: OutputSet, shard: str) -> None:
    output.folder(shard).mkdir(parents=True)
    (output.folder(shard) / DONE).write_text("{}")


def test_a_shard_is_begun_by_one_rank(tmp_path):
    output = OutputSet(tmp_path, ["a", "b", "c", "d"])
    one, other = Claims(output, 0), Claims(output, 1)
    assert one.take("a") and one.take("a") and not other.take("a")  # workers of one rank read parts of a shard
    finish(output, "b")
    assert not other.take("b")
    assert other.free([]) == ["d", "c"] and other.free(["d"]) == ["c"]
    output.note_unreadable("d", Problem("the server is gone"))
    assert other.free([]) == ["c"]
    one.release("a")
    one.release("a")
    assert other.free([]) == ["c", "a"] and other.take("a") and not one.take("a")
    one.forget(["a", "b"])  # it is of this rank's share, and the rank starts again
    assert one.take("a")


def test_shards_that_lost_processes_had_begun_are_free(tmp_path):
    output = OutputSet(tmp_path, ["a", "b"])
    one, other = Claims(output, 0), Claims(output, 1)
    assert one.take("a") and one.take("b")
    os.utime(tmp_path / "begun" / "b", times=(time.time() - 2 * LOST,) * 2, follow_symlinks=False)
    assert other.free([]) == ["b"] and other.take("b")
    Claims(output, 0).forget([])  # what it had taken over before it was killed
    assert other.free(["b"]) == ["a"]


def test_shards_that_could_not_be_read_at_an_earlier_start_are_tried_again(tmp_path):
    """Their ranks may start later, and a rank that ends before would take them for the only ones that are left."""
    output = OutputSet(tmp_path, ["a", "b"])
    for shard in output.shards:
        output.note_unreadable(shard, Problem("the server is gone"))
        os.utime(tmp_path / "unreadable" / f"{shard}.json", (1, 1))
    claims = Claims(output, 0)
    claims.forget([])
    assert claims.free([]) == ["b", "a"]
    output.note_unreadable("b", Problem("the server is still gone"))
    assert claims.free([]) == ["a"]


def test_a_shard_that_waited_is_not_lost_when_it_is_begun(tmp_path):
    """A rank takes over many shards at once, and begins the last of them hours later."""
    output = OutputSet(tmp_path, ["a"])
    one, other = Claims(output, 0), Claims(output, 1)
    assert one.take("a")
    os.utime(tmp_path / "begun" / "a", times=(time.time() - 2 * LOST,) * 2, follow_symlinks=False)
    assert one.take("a") and other.free([]) == []


def test_a_shard_whose_samples_are_written_is_not_lost(tmp_path):
    output = OutputSet(tmp_path, ["a", "b", "c"])
    one, other = Claims(output, 0), Claims(output, 1)
    assert one.take("a") and one.take("b") and other.take("c")
    for shard in output.shards:
        os.utime(tmp_path / "begun" / shard, times=(time.time() - 2 * LOST,) * 2, follow_symlinks=False)
    one.keep(["a", "c"])
    assert Claims(output, 2).free([]) == ["c", "b"]  # another rank says itself what becomes of its shards
    one.release("a")
    one.keep(["a"])
    assert Claims(output, 2).free([]) == ["c", "b", "a"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_keeps_shards_that_take_it_hours(recipe, tmp_path, monkeypatch, workers):
    """Another one without work would do them once more."""
    path, ages = recipe(workers=workers), ages_when_published(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    main([path])
    assert len(ages) == 3 and max(ages) < LOST


def test_shards_of_a_ranks_share_that_could_not_be_read_are_tried_again(tmp_path):
    """Their notes go first of all: other ranks would take them for the only ones that are left."""
    output = OutputSet(tmp_path, ["a", "b"])
    for shard in output.shards:
        output.note_unreadable(shard, Problem("the server is gone"))
    shards = shards_to_do({"train": output}, Rank(0, 2))
    label, shard, _ = next(shards)
    assert (label, shard) == ("train", "a") and output.unreadable() == {"b": Problem("the server is gone")}
    shards.close()
    assert not begun_shards(output)


def test_another_process_of_a_rank_knows_at_once_whose_a_shard_is(tmp_path, monkeypatch):
    """It reads another part of the shard: were this left out, the shard would not be finished."""
    output, found = OutputSet(tmp_path, ["a"]), []

    def then_asked(make):
        def made(*arguments, **options):
            result = make(*arguments, **options)
            found.append(Claims(output, 0).take("a"))
            return result

        return made

    for name in ("open", "symlink"):
        monkeypatch.setattr(os, name, then_asked(getattr(os, name)))
    assert Claims(output, 0).take("a") and found == [True]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM])
def test_without_links_a_rank_does_its_own_share(tmp_path, monkeypatch, number):
    """On a full disk, what writes the shard tells it. Some file systems have none."""
    claims = Claims(OutputSet(tmp_path, ["a", "b"]), 0)
    claims.forget(["a"])

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", fail)
    assert claims.take("a") and not claims.take("b")


def test_a_rank_without_work_does_the_shards_of_a_lost_one(encoded, recipe, tmp_path, monkeypatch, capsys):
    path, out = recipe(), tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")  # it has no shard of its own
    main([path])
    assert "takes over 1 of 3 shards" in capsys.readouterr().out
    assert Manifest.read(out / "train").shards == 3 and not (out / "train" / "begun").exists()
    assert digests(out / "train") == digests(encoded)
    monkeypatch.setenv("RANK", "0")
    main([path])
    assert "already complete" in capsys.readouterr().out


def test_each_rank_looks_into_the_folders_of_its_share_only(encoded, recipe, tmp_path, monkeypatch):
    """When a set that is whole is encoded again: hundreds of ranks would each look into all of its folders."""
    path, output = recipe(), OutputSet(tmp_path / "out" / "train", [])
    main([path])
    shards, looked, done = sorted(os.listdir(output.out / "shards")), [], OutputSet.is_done
    (output.folder(shards[1]) / DONE).unlink()
    monkeypatch.setattr(OutputSet, "is_done", lambda self, shard: looked.append(shard) or done(self, shard))
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in 0, 2:
        monkeypatch.setenv("RANK", str(rank))
        main([path])
        assert looked == [shards[rank]] and not output.is_encoded(shards[1])
        looked.clear()
    monkeypatch.setenv("RANK", "1")  # which goes on with what its share lacks
    main([path])
    assert digests(output.out) == digests(encoded)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_another_rank_has_begun_is_left_to_it(encoded, recipe, tmp_path, monkeypatch, workers):
    path, output = recipe(workers=workers), OutputSet(tmp_path / "out" / "train", [])
    free = Claims.forget

    def begun_afterwards(claims, shards):
        free(claims, shards)
        for shard in shards:
            if shard.startswith("00002"):
                Claims(output, 1).take(shard)

    with monkeypatch.context() as patch:
        patch.setattr(Claims, "forget", begun_afterwards)
        patch.setenv("WORLD_SIZE", "2")
        main([path])
    assert len(list(output.out.glob("shards/*/done.json"))) == 2 and not (output.out / "manifest.json").exists()
    main([path])  # one process: it shares with nobody
    assert digests(output.out) == digests(encoded)


def test_ranks_without_work_that_look_at_the_same_time_do_different_shards(recipe, tmp_path, monkeypatch, capsys):
    path, output = recipe(), OutputSet(tmp_path / "out" / "train", [])
    look = Claims.free

    def taken_afterwards(claims, tried):
        found = look(claims, tried)
        if len(found) == 3:
            assert Claims(output, 6).take(found[0])
        return found

    monkeypatch.setattr(Claims, "free", taken_afterwards)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")  # it has no shard of its own
    main([path])
    assert len(list(output.out.glob("shards/*/done.json"))) == 2
    assert "1 of 3 shards are left to other ranks" in capsys.readouterr().out


def test_a_rank_does_those_of_its_shards_that_another_gave_up(encoded, recipe, tmp_path, monkeypatch):
    path, output = recipe(), OutputSet(tmp_path / "out" / "train", [])
    forget, look = Claims.forget, Claims.free

    def begun_afterwards(claims, shards):
        forget(claims, shards)
        for shard in shards:
            assert Claims(output, 1).take(shard)

    def given_up(claims, tried):
        for shard in os.listdir(output.out / "begun"):
            output.note_unreadable(shard, Problem("the server is gone"))
            Claims(output, 1).release(shard)
        return look(claims, tried)

    monkeypatch.setattr(Claims, "forget", begun_afterwards)
    monkeypatch.setattr(Claims, "free", given_up)
    monkeypatch.setenv("WORLD_SIZE", "2")
    main([path])
    assert digests(output.out) == digests(encoded)


def test_what_one_rank_could_not_read_and_another_has_begun_is_not_given_up(tmp_path, capsys):
    """A machine without a network gives up all shards that it takes over. The others read them all the same."""
    output = OutputSet(tmp_path, ["a", "b"])
    finish(output, "a")
    output.note_unreadable("b", Problem("the server is gone"))
    assert Claims(output, 1).take("b")

    class Config:
        leave_out_unreadable = False

    _finish(Config, {"train": output}, Rank(0, 2), {}, {}, {})
    assert "1 of 2 shards are left to other ranks" in capsys.readouterr().out
    Claims(output, 1).release("b")
    with pytest.raises(ValueError, match="1 input shards could not be read.*b: the server is gone"):
        _finish(Config, {"train": output}, Rank(0, 2), {}, {}, {})


@pytest.mark.parametrize("moment", ["write", "close"])
def test_a_rank_that_was_taken_for_lost_while_it_wrote_leaves_the_shard(
    encoded, recipe, tmp_path, monkeypatch, capsys, moment
):
    """It writes no MDS file for an hour. Another rank finishes its shard, merges the set and removes its folder."""
    path, output = recipe(size_limit="1kb"), OutputSet(tmp_path / "out" / "train", [])
    act, overtaken = getattr(ShardFolder, moment), []

    def hours_later(folder, *arguments, **options):
        if not overtaken:
            overtaken.append(folder.folder)
            for shard in sorted(os.listdir(encoded / "shards")):
                shutil.copytree(encoded / "shards" / shard, output.folder(shard))
            with monkeypatch.context() as patch:
                patch.setattr("time.time", lambda now=time.time: now() + STALE + 1)
                OutputSet(output.out, os.listdir(encoded / "shards")).remove_stale()
            assert not folder.folder.exists()
        return act(folder, *arguments, **options)

    monkeypatch.setattr(ShardFolder, moment, hours_later)
    monkeypatch.setenv("WORLD_SIZE", "2")
    main([path])
    assert len(overtaken) == 1 and "wrote" in capsys.readouterr().out
    assert digests(output.out) == digests(encoded)


def test_a_folder_that_somebody_removed_is_one_line(recipe, tmp_path, monkeypatch, capsys):
    write = ShardFolder.write

    def removed(folder, row):
        shutil.rmtree(folder.folder)
        write(folder, row)

    monkeypatch.setattr(ShardFolder, "write", removed)
    with pytest.raises(SystemExit):
        main([recipe(size_limit="1kb")])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "removed while" in line)
    assert "tmp-0: removed while it was written; leave the folder alone and start the job again" in line


def test_jobs_that_are_killed_and_go_on_with_other_numbers_of_processes_end_in_the_same_bytes(recipe, tmp_path):
    """`python benchmarks/killing.py yamls/openmoji_encode.yaml --ranks 1 2 3 5 --changing` kills 50 times."""
    options = ["--kills=4", "--changing", "--ranks", "1", "2", "3", "4"]
    done = launch(1, ROOT / "benchmarks" / "killing.py", recipe(workers=1), *options)
    assert done.returncode == 0 and "4 kills on [1, 2, 3, 4] ranks" in done.stdout, done.stdout + done.stderr
    assert "the same bytes" in done.stdout
