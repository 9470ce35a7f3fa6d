"""The encode job where shards cannot be read, processes die, or another job is in the way."""

import ctypes
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from benchmarks.killing import digests, fork
from data.encoded.manifest import Manifest
from data.sources.base import Rejected
from data.sources.filters import Filter
from data.sources.tars import TarSource
from precompute.encode import main
from precompute.encoding import pipeline
from precompute.encoding.job import store_null_text
from precompute.output.output_set import OutputSet
from precompute.output.problems import Problem
from tests.disks import fill, read_only, small_disk, small_files
from tests.locks import held_by_a_child
from tests.precompute.encode_checks import assert_same, expect_error


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """PyTorch looks for workers that have died after 5 s without a batch; not in each of these tests."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def test_shards_that_cannot_be_read_stay_undone(encoded, read, recipe, tmp_path, monkeypatch, capsys):
    path, told = recipe(workers=1), []
    read_shard = TarSource.read

    def broken(self, shard):
        yield from list(read_shard(self, shard))[:2]
        if shard.startswith("00001"):
            raise ConnectionError("the server is gone")
        yield from list(read_shard(self, shard))[2:]

    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", broken)
        patch.setattr(pipeline, "every_rank", SimpleNamespace(warning=told.append))
        error = expect_error([path], capsys, status=1)  # an outage: a cluster starts the job again
    assert "1 input shards could not be read" in error and "the server is gone" in error
    assert len(told) == 1 and "could not be read: the server is gone" in told[0]  # at once: the job may take days
    out = tmp_path / "out" / "train"
    assert len(list((out / "shards").iterdir())) == 2 and not (out / "manifest.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", broken)
        error = expect_error([path, "leave_out_unreadable=true"], capsys, status=1)
    assert "1 input shards could not be read" in error and Manifest.read(out).shards == 2
    assert_same([s for s in read(encoded) if not s["key"].startswith("00001")], read(out))
    main([path])
    assert_same(read(encoded), read(out))
    assert not list((out / "unreadable").iterdir()) and Manifest.read(out).shards == 3


@pytest.mark.parametrize("ends", [False, True])
def test_an_interrupt_that_a_source_catches_ends_the_job(recipe, tmp_path, monkeypatch, capsys, ends):
    """The sample was rejected, or the rest of its shard left out, in a set that was complete."""
    read_shard = TarSource.read

    def catches(self, shard):
        for number, sample in enumerate(read_shard(self, shard)):
            try:
                if number == 1:
                    signal.raise_signal(signal.SIGINT)
            except BaseException:
                if ends:
                    return
                sample = Rejected(sample.key, "broken_image")
            yield sample

    monkeypatch.setattr(TarSource, "read", catches)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            main([recipe(workers=0)])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130 and "encode: interrupted; start it again" in capsys.readouterr().out
    assert not list(tmp_path.rglob("done.json"))


def test_a_last_shard_that_cannot_be_published_is_an_error(recipe, tars, monkeypatch, capsys):
    """No other one is published after it."""

    def refuse(self, shard, rank):
        raise ValueError("the store is gone")

    monkeypatch.setattr(OutputSet, "publish", refuse)
    one = {"train": {"name": "tars", "urls": f"{tars}/00002.tar"}}
    assert "the store is gone" in expect_error([recipe(sources=one, resolutions=[16])], capsys)


def test_the_last_rank_names_what_the_others_could_not_read(encoded, read, recipe, tmp_path, monkeypatch, capsys):
    """A rank that fails earlier than the others would make the launcher stop them. Ranks may start hours apart."""
    path, out = recipe(workers=0, take_over=False), tmp_path / "out" / "train"
    read_shard = TarSource.read

    def broken(self, shard):
        if shard.startswith("00001"):
            raise EOFError("a library's own error")
        return read_shard(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", broken)
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "1")  # its only shard is the broken one
        main([path])
        assert "rank 1 could not read: 00001" in capsys.readouterr().out
        (note,) = (out / "unreadable").iterdir()
        os.utime(note, (0, 0))
        patch.setenv("RANK", "0")
        error = expect_error([path], capsys)
        assert "1 input shards could not be read" in error and "EOFError a library's own error" in error
        assert len(list((out / "shards").iterdir())) == 2 and not (out / "manifest.json").exists()
        expect_error([path, "leave_out_unreadable=true"], capsys)
        assert Manifest.read(out).shards == 2
    main([path])  # of another number of processes
    assert not note.exists() and Manifest.read(out).shards == 3
    assert_same(read(encoded), read(out))


def test_a_set_that_cannot_be_completed_does_not_end_the_ranks_at_another(recipe, tars, tmp_path, monkeypatch, capsys):
    sources = {"val": f"{tars}/00000.tar", "train": f"{tars}/{{00001..00002}}.tar"}
    path = recipe(take_over=False, sources={label: {"name": "tars", "urls": urls} for label, urls in sources.items()})
    read_shard = TarSource.read

    def broken(self, shard):
        if shard.startswith("00000"):
            raise EOFError("a library's own error")
        return read_shard(self, shard)

    monkeypatch.setattr(TarSource, "read", broken)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")  # of both sets
    main([path])
    assert "rank 0 could not read: 00000" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert "1 input shards could not be read" in expect_error([path], capsys)
    assert Manifest.read(tmp_path / "out" / "train").shards == 2


def test_an_old_note_of_a_shard_that_is_done_is_nothing(recipe, monkeypatch, tmp_path):
    path, output = recipe(), OutputSet(tmp_path / "out" / "train", [])
    main([path])
    (tmp_path / "out" / "train" / "manifest.json").unlink()
    monkeypatch.setenv("WORLD_SIZE", "2")
    shard = next(p.name for p in (output.out / "shards").iterdir() if p.name.startswith("00001"))  # rank 1's
    output.note_unreadable(shard, Problem("the server is gone"))
    main([path])
    assert Manifest.read(output.out).shards == 3


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_picture_that_kills_the_decoder_is_rejected_and_the_job_goes_on(
    encoded, read, recipe, tmp_path, monkeypatch, capsys, number
):
    decode = Filter.decode

    def kill(self, sample, shrink_to=None):
        if sample.key == "00001_003":
            os.kill(os.getpid(), number)
        return decode(self, sample, shrink_to)

    monkeypatch.setattr(Filter, "decode", kill)
    main([recipe(workers=2)])
    assert_same([s for s in read(encoded) if s["key"] != "00001_003"], read(tmp_path / "out" / "train"))
    assert Manifest.read(tmp_path / "out" / "train").rejected["kills_decoder"] == 1
    assert "at sample 3 of 00001" in capsys.readouterr().out


def test_a_death_interrupts_nothing(recipe, monkeypatch):
    """PyTorch's handler of signals would raise an error in the encoders, or in the midst of a lock."""
    decode, encode, begun, ended = Filter.decode, pipeline.encode, [], []

    def kill(self, sample, shrink_to=None):
        if sample.key == "00001_001":  # of the second batch
            time.sleep(0.5)  # by then the first one is encoded
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(self, sample, shrink_to)

    def slow(*arguments):
        begun.append(1)
        time.sleep(1.5)  # the worker dies meanwhile
        ended.append(1)
        return encode(*arguments)

    monkeypatch.setattr(Filter, "decode", kill)
    monkeypatch.setattr(pipeline, "encode", slow)
    main([recipe(workers=1)])
    assert len(begun) == len(ended) > 0


def test_a_bus_error_ends_the_job_and_no_picture_is_rejected(recipe, monkeypatch, capsys):
    """It is that of a full /dev/shm. PyTorch says so, unless this process waits for a batch at that moment."""
    decode = Filter.decode

    def full(self, sample, shrink_to=None):
        if sample.key == "00001_003":
            time.sleep(0.5)  # by then it waits
            os.kill(os.getpid(), signal.SIGBUS)
        return decode(self, sample, shrink_to)

    monkeypatch.setattr(Filter, "decode", full)
    error = expect_error([recipe(workers=1)], capsys)
    assert "Bus error); it may have run out of memory, or of shared memory (/dev/shm" in error


def test_a_batch_that_cannot_be_shared_ends_the_job(recipe, capsys):
    """In the thread that sends it, the error would only be printed, and the job would wait for the batch for ever."""

    def waited(number, frame):
        raise TimeoutError("the job hangs")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    try:
        with small_files(100_000):  # 64 images of 32 x 32 take 196,608 bytes
            error = expect_error([recipe(workers=1, batch=64, resolutions=[32])], capsys)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "unable to resize file" in error and "lower workers, prefetch or batch" in error


def test_a_full_or_read_only_disk_costs_one_line_and_a_job_with_room_goes_on(encoded, recipe, tmp_path, capsys):
    with small_disk(tmp_path / "out", 1) as out:
        path = recipe()
        read_only(out)
        assert f"{out}/.lock-0: Read-only file system; check permissions" in expect_error([path], capsys)
        read_only(out, False)
        places = {0: ".lock-0", 12_288: "null_text.npy", 40_000: ".place-0", 80_000: "00000-", 130_000: "0000[12]-"}
        for room, place in places.items():
            filler = fill(out, room)
            error = expect_error([path], capsys)
            assert re.match(rf"error: {out}/.*{place}.*: No space left on device; make room there", error), error
            filler.unlink()
            left = [file.name for file in out.rglob("*") if file.name.startswith(".") or ".tmp-" in file.name]
            assert left == [".lock-0"]
        main([path])
        assert digests(out) == digests(encoded.parent)


def test_options_that_cannot_be_written_leave_nothing(tmp_path):
    output = OutputSet(tmp_path, [])
    with small_files(10), pytest.raises(OSError, match=f"File too large: '{tmp_path}/options.json'"):
        output.claim({"seed": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_picture_that_kills_a_job_without_workers_is_rejected_at_the_third_start(
    encoded, read, recipe, tmp_path, monkeypatch, capsys
):
    decode, out, recipe = Filter.decode, tmp_path / "out", recipe(workers=0)

    def killed_by(kill):
        def patched(self, sample, shrink_to=None):
            if sample.key == "00001_003":
                kill()
            return decode(self, sample, shrink_to)

        with monkeypatch.context() as patch:
            patch.setattr(Filter, "decode", patched)
            child = fork(lambda: main([recipe]), tmp_path / "log.txt", {})
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert killed_by(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL  # from outside: no sample's fault
    assert killed_by(lambda: ctypes.string_at(0)) == -signal.SIGSEGV
    assert not (out / "crashes.jsonl").exists()  # the next start finds it
    assert killed_by(lambda: ctypes.string_at(0)) == -signal.SIGSEGV
    assert len((out / "crashes.jsonl").read_text().splitlines()) == 1
    main([recipe])
    assert_same([s for s in read(encoded) if s["key"] != "00001_003"], read(out / "train"))
    assert Manifest.read(out / "train").rejected["kills_decoder"] == 1
    printed = capsys.readouterr().out
    for end in ("trying again", "rejected as kills_decoder"):
        assert re.search(f"Fatal Python error: Segmentation fault .*at sample 3 of 00001.*{end}", printed), printed
    assert not list(out.glob(".place-*")) and not list(out.glob(".fault-*"))


def test_a_shard_that_kills_its_reader_is_given_up(encoded, read, recipe, tmp_path, monkeypatch, capsys):
    read_shard = TarSource.read

    def kill(self, shard):
        for number, sample in enumerate(read_shard(self, shard)):
            if number == 2 and shard.startswith("00001"):
                os._exit(3)
            yield sample

    monkeypatch.setattr(TarSource, "read", kill)
    error = expect_error([recipe(workers=1), "leave_out_unreadable=true"], capsys)
    assert "1 input shards could not be read" in error and "die at sample 2 of 00001" in error
    assert_same([s for s in read(encoded) if not s["key"].startswith("00001")], read(tmp_path / "out" / "train"))


def test_a_shard_that_killed_three_starts_is_read_again_when_their_notes_are_removed(encoded, recipe, tmp_path, capsys):
    path, notes = recipe(), tmp_path / "out" / "crashes.jsonl"
    (shard,) = (folder.name for folder in (encoded / "shards").iterdir() if folder.name.startswith("00001"))
    notes.parent.mkdir()
    notes.write_text(3 * (json.dumps({"label": "train", "shard": shard, "sample": 2, "reason": "died"}) + "\n"))
    for _ in range(2):  # at the second start no other shard is left
        error = expect_error([path], capsys)
        assert error.endswith(f"die at sample 2 of {shard}; {notes} notes it: remove the file to try again")
    notes.unlink()
    main([path])
    assert Manifest.read(tmp_path / "out" / "train").samples == Manifest.read(encoded).samples


def test_two_jobs_do_not_write_into_one_folder(recipe, tmp_path, capsys):
    with held_by_a_child(tmp_path / "out" / ".lock-0") as child:  # the other job
        error = expect_error([recipe()], capsys)
    assert f"out: another encode job writes into {tmp_path / 'out'} (process {child} on " in error
    main([recipe()])


def test_a_shard_that_workers_count_differently_stays_undone(
    encoded, read, recipe, tmp_path, tars, monkeypatch, capsys
):
    """As a remote shard can be, when one of two downloads breaks off."""
    path = recipe(sources={"train": {"name": "tars", "urls": f"{tars}/00000.tar"}}, workers=2)
    read_shard = TarSource.read

    def torn(self, shard):
        samples = list(read_shard(self, shard))
        yield from samples[:3] if get_worker_info().id else samples

    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", torn)
        error = expect_error([path], capsys)
    assert "1 input shards could not be read" in error and "one process read samples up to number" in error
    out = tmp_path / "out" / "train"
    assert not list((out / "shards").iterdir()) and not (out / "manifest.json").exists()
    main([path])
    assert_same([s for s in read(encoded) if s["key"].startswith("00000")], read(out))


def test_an_error_in_a_worker_keeps_its_traceback(recipe, monkeypatch):
    def fail(self, sample, shrink_to=None):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Filter, "decode", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main([recipe(workers=1)])


def test_a_worker_that_dies_is_reported(recipe, monkeypatch, capsys):
    def die(self, sample, shrink_to=None):
        os._exit(9)

    monkeypatch.setattr(Filter, "decode", die)
    monkeypatch.setattr("data.workers.quarantine.LIMIT", 3)
    error = expect_error([recipe(workers=1)], capsys)
    assert "a decoding process died" in error and "shm" in error


@pytest.mark.parametrize("first", [float("inf"), float("nan"), 7e4])  # 7e4 is finite, but not in float16
def test_a_null_text_that_is_not_finite_is_computed_in_fp32(tmp_path, first):
    def embed(tokens, exact=False):
        return torch.full((1, 2, 3), in_fp32 if exact else first)

    tokenize, file = (lambda captions: torch.zeros(len(captions), 2)), tmp_path / "null_text.npy"
    texts = SimpleNamespace(length=2, width=3, id="mine", device=torch.device("cpu"), tokenize=tokenize, embed=embed)
    in_fp32 = first
    with pytest.raises(ValueError, match="text_encoder: mine gives values that are not finite, also in fp32; check"):
        store_null_text(file, texts)
    assert not file.exists()
    in_fp32 = 0.5
    store_null_text(file, texts)
    assert (np.load(file) == np.full((2, 3), 0.5, np.float16)).all()


def test_a_damaged_null_text_is_written_anew(encoders, tmp_path):
    """The job would finish a set that training refuses."""
    file, (_, texts) = tmp_path / "null_text.npy", encoders
    store_null_text(file, texts)
    whole, number = file.read_bytes(), file.stat().st_ino
    store_null_text(file, texts)
    assert file.stat().st_ino == number  # a whole one stays
    for damaged in (b"", whole[:-2], whole + b"\0", b"?" + whole[1:]):
        file.write_bytes(damaged)
        store_null_text(file, texts)
        assert file.read_bytes() == whole
