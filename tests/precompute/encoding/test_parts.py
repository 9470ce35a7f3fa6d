"""The parts of the encode job that need no encoder: ranks, writer, pipeline, uploads, progress."""

import errno
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from data.sources.base import InputShard, Position, Rejected
from data.system.errors import WrongResult
from data.system.log import every_rank, log
from data.system.ranks import Rank
from precompute.encoding.batch import DecodedBatch, ShardEnd
from precompute.encoding.columns import LatentColumns
from precompute.encoding.decode import DecodedBatches, Preparation, assign, batches
from precompute.encoding.pipeline import EncodePipeline
from precompute.encoding.progress import EncodeProgress, duration
from precompute.encoding.writer import ShardWriter, Storage
from precompute.output import upload
from precompute.output.upload import Uploads
from tests.precompute.output_sets import COLUMNS, fail, sample


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_shard_goes_to_one_rank(world):
    items = list(range(20))
    shares = [Rank(rank, world).share(items) for rank in range(world)]
    assert sorted(sum(shares, [])) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("shards", "workers"), [(0, 3), (1, 1), (1, 4), (2, 5), (3, 3), (10, 3)])
def test_every_sample_goes_to_one_worker(shards, workers):
    jobs = [InputShard("train", str(i)) for i in range(shards)]
    taken = [
        (job, number)
        for worker in range(workers)
        for job, part, parts in assign(jobs, worker, workers)
        for number in range(part, 10, parts)
    ]
    assert len(taken) == len(set(taken)) == 10 * shards


def test_an_interrupt_waits_until_all_workers_are_forked(monkeypatch):
    begun = []

    def begin(loader):
        signal.raise_signal(signal.SIGINT)
        begun.append(loader)
        return iter([])

    monkeypatch.setattr(DataLoader, "__iter__", begin)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(batches(DecodedBatches([], {}, None), workers=0, prefetch=2, pin=False))
        assert len(begun) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
        assert list(batches(DecodedBatches([], {}, None), workers=0, prefetch=2, pin=False)) == []
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lack_of_memory_ends_the_job_and_gives_no_shard_up(workers):
    """By `leave_out_unreadable` the set would lack it, and all that are read after it."""

    class Source:
        def read(self, shard):
            raise MemoryError

    shards, preparation = [InputShard("train", "a")], Preparation(None, None, (), "center", 1, False, 0, 1)
    decoded = DecodedBatches(shards, {"train": Source()}, preparation)
    with pytest.raises(MemoryError, match="while input shard a was read"):
        list(batches(decoded, workers=workers, prefetch=2, pin=False))


def test_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Rank.from_environment() == Rank(0, 1, 0)
    for text in ("0", "x"):  # the variables are of commands, whose threads are set before errors can be told
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE is '?{text}"):
            Rank.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'many'"):
        Rank.from_environment()


def test_a_shard_is_complete_when_all_its_parts_were_read(tmp_path):
    def writer(name: str) -> ShardWriter:
        return ShardWriter(tmp_path / name, name, COLUMNS, Storage(), {})

    whole = writer("whole")
    whole.add(0, sample("0"))
    whole.end(1, parts=2)
    assert not whole.complete
    whole.end(1, parts=2)
    assert whole.complete
    torn = writer("torn")
    torn.end(1, parts=2)
    with pytest.raises(ValueError, match="one process read samples up to number 1, another up to number 2"):
        torn.end(2, parts=2)


def test_a_key_that_a_shard_has_twice_is_refused(tmp_path):
    """Where a source yields samples in another order to each process, some were encoded twice and others never."""
    writer = ShardWriter(tmp_path / "twice", "twice", COLUMNS, Storage(), {})
    for number, one in enumerate((sample("a"), Rejected("a", "duplicate_key"), sample("b"))):
        writer.add(number, one)
    with pytest.raises(WrongResult, match="^the source yields the key 'a' twice in the shard twice; yield each key on"):
        writer.add(3, sample("a"))


def test_after_an_error_of_the_writer_nothing_more_is_encoded():
    position = Position(InputShard("train", "a"), 0)
    rejected = [(position, Rejected("k", "broken_image"))]
    source = iter([DecodedBatch({}, torch.empty(0), [], rejected) for _ in range(100)])
    progress = EncodeProgress(1, quiet=True)
    with pytest.raises(OSError, match="No space left"):
        EncodePipeline(None, None, fail(OSError(errno.ENOSPC, "No space left")), print, progress).run(source)
    assert len(list(source)) > 50


def test_an_error_of_the_writer_comes_before_the_death_of_a_worker():
    """After which the job begins what is left again, and would wait for a writer for ever."""

    def source():
        for number in range(2):  # the first one is handed to the writer when the second is there
            rejected = [(Position(InputShard("train", "a"), number), Rejected("k", "broken_image"))]
            yield DecodedBatch({}, torch.empty(0), [], rejected)
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed")

    progress = EncodeProgress(1, quiet=True)
    job = EncodePipeline(None, None, fail(OSError(errno.ENOSPC, "No space left")), print, progress)
    with pytest.raises(OSError, match="No space left"):
        job.run(source())


def test_encoders_do_not_wait_for_shards_that_are_complete_together(tmp_path):
    shards, read = [InputShard("train", str(number)) for number in range(12)], threading.Event()

    def source():
        for shard in shards:
            rejected = [(Position(shard, 0), Rejected("k", "broken_image"))]
            yield DecodedBatch({}, torch.empty(0), [], rejected, [ShardEnd(shard, 1, 1)])
        read.set()

    def open_writer(shard):
        return ShardWriter(tmp_path / shard.shard, shard.shard, COLUMNS, Storage(), {})

    def publish(shard):
        published.append(shard if read.wait(60) else "the encoders waited")

    published = []
    EncodePipeline(None, None, open_writer, publish, EncodeProgress(12, quiet=True)).run(source())
    assert published == shards


class InThisProcess:
    """In place of the process that uploads: tasks are functions."""

    killed = False

    def __init__(self, script):
        assert script.is_file()

    def start(self):
        pass

    def do(self, task):
        task()

    def end(self):
        pass

    def kill(self):
        self.killed = True


def test_uploads_go_on_beside_the_job(monkeypatch):
    """In order, all before the context ends. After an error no other one begins, and who adds the next one is told."""
    monkeypatch.setattr(upload, "HelperProcess", InThisProcess)
    done, may_go = [], threading.Event()
    with Uploads() as uploads:
        uploads.add(lambda: may_go.wait(60) and done.append(0))
        uploads.add(lambda: done.append(1))
        assert not done  # `add` has not waited for the first one
        may_go.set()
    assert done == [0, 1]

    def fail():
        raise ValueError("the store is gone")

    with pytest.raises(ValueError, match="the store is gone"), Uploads() as uploads:
        uploads.add(fail)
        uploads.add(lambda: done.append(2))
    with pytest.raises(ValueError, match="the store is gone"), Uploads() as uploads:
        uploads.add(fail)
        while True:
            uploads.add(lambda: done.append(3))

    def until_the_next_is_cancelled():
        while not uploads._begun[1].cancelled():
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), Uploads() as uploads:
        may_go.clear()
        uploads.add(lambda: may_go.wait(60) and until_the_next_is_cancelled())
        uploads.add(lambda: done.append(4))
        may_go.set()
        raise KeyboardInterrupt
    may_go.clear()
    with pytest.raises(KeyboardInterrupt), Uploads() as uploads:  # that comes while the context waits
        shutdown = uploads._thread.shutdown

        def interrupted(**options):
            uploads._thread.shutdown = shutdown
            raise KeyboardInterrupt

        uploads._thread.shutdown = interrupted
        uploads.add(lambda: may_go.wait(60) and until_the_next_is_cancelled())
        uploads.add(lambda: done.append(5))
    assert uploads._begun[1].cancelled() and uploads._process.killed
    may_go.set()
    assert done == [0, 1]


def test_every_rank_speaks_of_its_own_part(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    log.info("of the whole job")
    every_rank.info("of this rank")
    assert capsys.readouterr().out == "of this rank\n"


def test_sizes_of_stable_diffusion_2():
    columns = LatentColumns({256: (4, 32, 32), 512: (4, 64, 64)}, (77, 1024))
    assert sum(columns.bytes_by_part().values()) == 2 * 2 * 4 * (32**2 + 64**2) + 2 * 77 * 1024 + 2 * 16 + 16
    assert columns.encodings()["mean_512"] == "ndarray:float16:4,64,64"


def test_progress(monkeypatch, capsys):
    now = iter([0.0, 5.0, 11.0, 20.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now, 20.0))
    progress = EncodeProgress(shards=4)
    progress.update(50, 0)
    assert capsys.readouterr().out == ""  # not yet ten seconds
    progress.update(45, 5)
    out = capsys.readouterr().out
    assert "95 images, shard 1/4" in out and "ETA ?" in out
    progress.shard_done(100)
    assert progress.line() == "encode: 95 images, shard 2/4, 4.8 images/s, ETA 1:00"
    assert [duration(s) for s in (9.6, 61, 3725)] == ["10s", "1:01", "1:02:05"]
