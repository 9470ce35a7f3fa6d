"""Ranks that go on with shards of others, and jobs whose number of processes changes while they are killed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.killing import digests
from data.manifest import Manifest
from precompute.claims import LOST, Claims
from precompute.encode import main
from precompute.output import DONE, OutputSet

ROOT = Path(__file__).parents[2]


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
    output.note_unreadable("d", "the server is gone")
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
    os.utime(tmp_path / "begun" / "b", times=(time.time() - 2 * LOST,) * 2)
    assert other.free([]) == ["b"] and other.take("b")
    assert one.free([]) == ["a"]  # its own, of before it was killed


def test_shards_that_could_not_be_read_at_an_earlier_start_are_tried_again(tmp_path):
    """Their ranks may start later, and a rank that ends before would take them for the only ones that are left."""
    output = OutputSet(tmp_path, ["a", "b"])
    for shard in output.shards:
        output.note_unreadable(shard, "the server is gone")
        os.utime(tmp_path / "unreadable" / f"{shard}.json", (1, 1))
    claims = Claims(output, 0)
    claims.forget([])
    assert claims.free([]) == ["b", "a"]
    output.note_unreadable("b", "the server is still gone")
    assert claims.free([]) == ["a"]


def test_a_full_disk_is_told_by_what_writes_the_shard(tmp_path, monkeypatch):
    claims = Claims(OutputSet(tmp_path, ["a"]), 0)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert claims.take("a")


def test_a_rank_without_work_does_the_shards_of_a_lost_one(encoded, recipe, tmp_path, monkeypatch, capsys):
    path, out = recipe(), tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")  # it has no shard of its own
    main([path])
    assert "takes over 1 of 3 shards" in capsys.readouterr().out
    assert Manifest.read(out / "train").shards == 3 and not os.listdir(out / "train" / "begun")
    assert digests(out / "train") == digests(encoded)
    monkeypatch.setenv("RANK", "0")
    main([path])
    assert "already complete" in capsys.readouterr().out


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


def test_jobs_that_are_killed_and_go_on_with_other_numbers_of_processes_end_in_the_same_bytes(recipe, tmp_path):
    """`python benchmarks/killing.py yamls/openmoji_encode.yaml --ranks 1 2 3 5 --changing` kills 50 times."""
    command = [sys.executable, "benchmarks/killing.py", recipe(workers=1), "--kills=4", "--changing", "--ranks"]
    done = subprocess.run([*command, "1", "2", "3", "4"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and "4 kills on [1, 2, 3, 4] ranks" in done.stdout, done.stdout + done.stderr
    assert "the same bytes" in done.stdout
