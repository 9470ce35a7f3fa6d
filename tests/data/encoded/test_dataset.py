"""Batches of latents, against streaming's own decoding and torch's own collation; position and errors."""

import contextlib
import errno
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import Stream, StreamingDataset
from torch.utils.data import DataLoader

from data.encoded.column_reader import ColumnReader
from data.encoded.dataset import (
    LONGEST_WAIT,
    EncodedDataset,
    dataset_arguments,
    key_seed,
    keys_of,
    open_loader,
    streams_of,
)
from data.encoded.sets import local_set
from data.latents import LatentDataset
from data.loading import Placement, end_workers, leave_signals
from data.system.errors import Outage
from data.system.helper_process import end_with_parent
from precompute.encoding.columns import LatentColumns
from precompute.encoding.writer import EncodedSample, ShardWriter, Storage
from recipes.training.stop import SIGNALS

TEXT = (5, 8)
BATCH = 4
ALGORITHMS = ["py1e", "py1s", "py1br", "py2s", "naive"]


class Stock(StreamingDataset):
    """A sample as streaming decodes it."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        columns = {"mean": "mean_32", "std": "std_32", "text": "text"}
        item = {name: torch.from_numpy(sample[column].copy()) for name, column in columns.items()}
        return {**item, "seed": key_seed(sample["key"])}


def write(folder: Path, count: int, seed: int = 0, sides=(32,), size_limit="4kb", compression=None, hashes=()) -> Path:
    """A set as the encode job writes one; latents at an eighth of each side."""
    rng = np.random.default_rng(seed)
    columns = LatentColumns({side: (4, side // 8, side // 8) for side in sides}, TEXT)
    writer = ShardWriter(folder, "a", columns, Storage(size_limit, compression, hashes), {})
    for number in range(count):
        row = {"key": f"{seed}_{number}é", "caption": "x" * int(rng.integers(90)), "width": number, "height": 1}
        for side, shape in columns.latents.items():
            row[f"crop_{side}"] = np.arange(4, dtype=np.int32)
            for name in ("mean", "std"):
                row[f"{name}_{side}"] = rng.standard_normal(shape).astype(np.float16)
        row["text"] = rng.standard_normal(TEXT).astype(np.float16)
        writer.add(number, EncodedSample(row, {side: np.zeros((3, 4)) for side in sides}))
    writer.end(count)
    writer.finish()
    return folder


def make_loader(
    fast: bool, streams: list[dict], workers: int = 0, blocks: int = 6, drop_last=False, **arguments
) -> DataLoader:
    arguments = {"batch_size": BATCH, "shuffle": True, "shuffle_seed": 3, **arguments}
    streams = [Stream(**stream) for stream in streams]
    if fast:
        dataset = LatentDataset(streams=streams, resolution=32, text="text", blocks=blocks, **arguments)
        return open_loader(dataset, Placement(arguments["batch_size"], training=True), workers, drop_last)
    dataset = Stock(streams=streams, **arguments)
    return DataLoader(dataset, BATCH, drop_last=drop_last, num_workers=workers, persistent_workers=workers > 0)


def copies(tmp_path: Path, *sets: Path) -> list[list[dict]]:
    """Each set twice, because streaming lends a folder to one data set at a time."""
    found = []
    for name in ("stock", "fast"):
        locals_ = [tmp_path / name / str(number) for number in range(len(sets))]
        for source, target in zip(sets, locals_, strict=True):
            shutil.copytree(source, target)
        found.append([{"local": str(path)} for path in locals_])
    return found


def assert_same(stock: list[dict], fast: list[dict]) -> None:
    assert len(stock) == len(fast) > 0
    for one, other in zip(stock, fast, strict=True):
        assert list(one) == list(other) and type(other) is dict
        for name in one:
            assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape
            assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = write(tmp_path_factory.mktemp("plain") / "set", 43)
    assert len(list(folder.glob("*.mds"))) > 5
    return folder


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batches_are_the_librarys(tmp_path, plain, algorithm):
    stock, fast = copies(tmp_path, plain)
    stock = make_loader(False, stock, shuffle_algo=algorithm, shuffle_block_size=16)
    fast = make_loader(True, fast, shuffle_algo=algorithm, shuffle_block_size=16)
    epochs = [list(fast), list(fast)]
    for epoch in epochs:
        *whole, last = itertools.islice(stock, len(stock))  # then some repeat samples
        assert_same([*whole, {name: tensor[: 43 % BATCH] for name, tensor in last.items()}], epoch)


@pytest.mark.parametrize("size", [BATCH, 40])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_epoch_ends_with_its_last_sample(tmp_path, plain, algorithm, size):
    """Also where an order goes on with repeated samples; here they are all behind the 43 of the epoch. Of an order of
    64, the second batch of 40 has 24."""
    loader = make_loader(True, copies(tmp_path, plain)[1], workers=1, shuffle_algo=algorithm, batch_size=size)
    for _ in range(2):
        batches = list(loader)
        assert [len(batch["seed"]) for batch in batches] == [size] * (43 // size) + [43 % size]
        assert len(set(torch.cat([batch["seed"] for batch in batches]).tolist())) == 43


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("blocks", [0, 2, 12])
def test_workers_give_the_same_batches(tmp_path, plain, workers, blocks):
    stock, fast = copies(tmp_path, plain)
    stock, fast = make_loader(False, stock, workers), make_loader(True, fast, workers, blocks)
    for _ in range(2):
        # All of an epoch's batches are held at once: none may lie where another one is written.
        assert_same(list(stock), list(fast))


@pytest.mark.parametrize("workers", [0, 2])
def test_mixed_compressed_streams(tmp_path, workers):
    """One of the streams holds further columns between the wanted ones."""
    sets = [
        write(tmp_path / "a", 20, seed=1, compression="zstd"),
        write(tmp_path / "b", 24, seed=2, sides=(32, 512, 256), size_limit="300kb"),
    ]
    stock, fast = copies(tmp_path, *sets)
    for streams in (stock, fast):
        for stream, share in zip(streams, (0.25, 0.75), strict=True):
            stream["proportion"] = share
    stock = make_loader(False, stock, workers, epoch_size=40)
    fast = make_loader(True, fast, workers, epoch_size=40)
    for _ in range(2):
        assert_same(list(stock), list(fast))


# Not 2: of several workers, streaming may evict a shard for one that another waits for, without end.
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_remote_with_eviction(tmp_path, workers, compression):
    remote = write(tmp_path / "remote", 240, size_limit="2kb", compression=compression)
    shards = len(list(remote.glob("*.mds*")))
    loaders = []
    for name in ("stock", "fast"):
        stream = {"local": str(tmp_path / name), "remote": str(remote)}
        arguments = {"predownload": 8, "cache_limit": 60_000, "shuffle_block_size": 20}
        loaders.append(make_loader(name == "fast", [stream], workers, **arguments))
    for _ in range(2):
        assert_same(*map(list, loaders))
    left = list((tmp_path / "fast").glob("*.mds"))
    assert 0 < len(left) < shards // 2


def test_a_cache_that_is_too_small_is_an_error(tmp_path, plain):
    stream = {"local": str(tmp_path / "cache"), "remote": str(plain)}
    with pytest.raises(ValueError, match="^data: Cache limit .* is too low. Increase the `cache_limit`"):
        make_loader(True, [stream], cache_limit=13_000)


def test_a_shard_evicted_before_it_is_read_is_fetched_again(tmp_path, plain):
    stock, fast = copies(tmp_path, plain)
    fast = [{"local": str(tmp_path / "cache"), "remote": fast[0]["local"]}]
    stock, fast = make_loader(False, stock, shuffle=False), make_loader(True, fast, shuffle=False).dataset
    fast.prepare_shard(0)
    fast.evict_shard(0)
    assert_same(list(stock)[:1], [fast.collate(fast[:BATCH])])


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_in_mid_epoch(tmp_path, plain, workers):
    stock, fast = copies(tmp_path, plain)
    whole = make_loader(False, stock, workers)
    expected = [list(whole), list(whole)]

    first = make_loader(True, fast, workers)
    done = list(first)
    iterator = iter(first)
    done += [next(iterator) for _ in range(5)]
    state = first.dataset.state_dict(5 * BATCH, from_beginning=True)
    del iterator, first
    gc.collect()

    second = make_loader(True, fast, workers)
    second.dataset.load_state_dict(state)
    assert_same(expected[0] + expected[1], done + list(second))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_resumes_after_any_batch(tmp_path, plain, workers, drop_last):
    """Also at an epoch's end, with batches fetched ahead, and when it was resumed before."""
    _, fast = copies(tmp_path, plain)
    arguments = {"workers": workers, "drop_last": drop_last}
    loader = make_loader(True, fast, **arguments)
    assert (loader.state_dict()["epoch"], loader.state_dict()["sample_in_epoch"]) == (0, 0)
    expected, states = [], [loader.state_dict()]
    for _ in range(3):
        for batch in loader:
            expected.append(batch)
            states.append(loader.state_dict())
            assert loader.state_dict(ahead=1) == states[-2] or (states[-2]["epoch"] < states[-1]["epoch"])
        states[-1] = loader.state_dict()
        assert states[-1]["sample_in_epoch"] == 0
    length = 10 if drop_last else 11
    assert len(expected) == 3 * length and states[length]["epoch"] == 1
    with pytest.raises(ValueError, match="position 99 batches ago was asked for"):
        loader.state_dict(ahead=99)
    del loader
    for stop in (0, 3, length - 1, length, length + 5):
        gc.collect()
        resumed = make_loader(True, fast, **arguments)
        resumed.load_state_dict(json.loads(json.dumps(states[stop])))
        assert resumed.state_dict() == states[stop]
        found = [batch for _ in range(2) for batch in resumed]
        assert_same(expected[stop : stop + len(found)], found)
        assert len(found) == 2 * length - stop % length
        again = resumed.state_dict()
        assert again["epoch"] == stop // length + 2 and again["sample_in_epoch"] == 0
        del resumed


@pytest.mark.parametrize(("algorithm", "seen"), [("py1e", 43), ("py2s", 44)])
def test_a_state_after_the_last_batch_does_not_give_an_empty_epoch(tmp_path, plain, algorithm, seen):
    """The loader cannot know at an epoch's last batch that there is none after it. py2s has 64 samples in an order of
    43, and states of earlier versions count whole batches of these."""
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast, shuffle_algo=algorithm)
    batches = iter(loader)
    for _ in range(11):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (0, 43)
    state["sample_in_epoch"] = seen
    second = list(loader)
    del batches, loader
    gc.collect()
    resumed = make_loader(True, fast, shuffle_algo=algorithm)
    resumed.load_state_dict(state)
    assert_same(second, list(resumed))
    del resumed
    gc.collect()
    resumed = make_loader(True, fast, shuffle_algo=algorithm)
    resumed.dataset.load_state_dict(state)  # as Composer does, which then takes what is left of the epoch
    assert list(resumed) == []
    assert_same(second, list(resumed))


def test_a_state_after_the_last_batch_of_other_ranks_leaves_nothing(tmp_path, plain):
    """43 samples, which one of two ranks has one of twice."""
    loader = make_loader(True, copies(tmp_path, plain)[1])
    left = {(1, 40): 3, (1, 43): 0, (1, 44): 0, (2, 40): 2, (2, 43): 0, (2, 44): 0, (3, 36): 3, (3, 43): 0}
    for (ranks, seen), samples in left.items():
        loader.ranks, loader.dataset.length = ranks, -(-43 // ranks)
        assert loader._expected(seen) == samples


def test_composers_state_at_an_epochs_end_is_the_next_epoch(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast)
    list(itertools.islice(loader, len(loader)))  # it asks for no more
    state = loader.dataset.state_dict(0, True)
    second = list(loader)
    assert state["epoch"] == 1 and loader.dataset.state_dict(8, True)["epoch"] == 1
    del loader
    gc.collect()
    resumed = make_loader(True, fast)
    resumed.dataset.load_state_dict(state)
    assert_same(second, list(resumed))


def test_an_epoch_that_ends_early_is_an_error(tmp_path, plain, monkeypatch):
    """Whatever the reason is: the batches are counted."""
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast)
    monkeypatch.setattr(EncodedDataset, "__iter__", lambda self: itertools.islice(StreamingDataset.__iter__(self), 30))
    with pytest.raises(RuntimeError, match="the epoch ended after 30 of 43 samples; see whether a shard"):
        list(loader)


def test_an_epoch_that_is_left_early_does_not_hinder_the_next(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast, predownload=4)
    next(iter(loader))
    assert len(list(loader)) == 11


def test_the_training_component_uses_it(latent_sets):
    from data.encoded.sets import local_set
    from data.latents import latents

    streams = {"train": local_set(path=str(latent_sets / "train"))}
    loading = latents(Placement(8, training=True), {}, streams=streams, resolution=32, workers=2)
    assert loading.loader.collate_fn == loading.loader.dataset.collate
    assert loading.loader.dataset.blocks.count > 2
    batches = list(loading.loader)
    assert len(batches) == 40 // 8
    assert batches[0]["mean"].shape == (8, 4, 16, 16) and batches[0]["mean"].dtype == torch.float16


def test_workers_of_a_process_that_ends_in_the_midst_of_an_epoch_end_with_it(tmp_path, plain):
    """multiprocessing alone would wait for ever for workers that ignore SIGTERM."""
    _, fast = copies(tmp_path, plain)
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(make_loader(True, fast, workers=2))
    next(batches)
    workers = [worker for worker in multiprocessing.active_children() if worker.daemon]
    assert len(workers) >= 2
    try:
        end_workers()
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_keys_are_found_by_their_seeds(latent_sets, monkeypatch):
    from data.encoded.sets import local_set
    from data.latents import latents

    streams = {"train": local_set(path=str(latent_sets / "train"))}
    loader = latents(Placement(8, training=True), {}, streams=streams, resolution=32).loader
    seeds = next(iter(loader))["seed"].tolist()
    found = keys_of(loader.dataset, [*seeds, 5])
    assert sorted(found) == sorted(seeds) and all(key_seed(key) == seed for seed, key in found.items())
    monkeypatch.setattr("data.encoded.dataset.LONGEST_SEARCH", -1.0)
    assert not keys_of(loader.dataset, seeds)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cut_shard_is_an_error(tmp_path, plain, workers):
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast, workers)
    os.truncate(Path(fast[0]["local"], "shard.00002.mds"), 100)
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match=r"shard.00002.mds: sample \d+ is damaged"):
        list(loader)
    Path(fast[0]["local"], "shard.00002.mds").unlink()
    with pytest.raises(ValueError, match=r"shard.00002.mds.*; copy or make the set again$"):
        list(make_loader(True, fast, workers))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, Outage), (errno.EACCES, ValueError)])
def test_a_shard_that_the_disk_does_not_give_is_one_line(tmp_path, plain, workers, number, kind, monkeypatch):
    """A cluster starts the run again where a mount is lost."""

    def lost(reader, sample):
        raise OSError(number, os.strerror(number))  # of a read, whose errors name no file

    monkeypatch.setattr(ColumnReader, "get_sample_data", lost)
    _, fast = copies(tmp_path, plain)
    with pytest.raises(ValueError, match=rf"^/.*shard.\d+.mds: {os.strerror(number)}; .*, and start") as error:
        list(make_loader(True, fast, workers))
    assert type(error.value) is kind


def test_a_damaged_sample_is_an_error(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    path = Path(fast[0]["local"], "shard.00000.mds")
    data = bytearray(path.read_bytes())
    data[8:12] = np.uint32(len(data) - 50).tobytes()  # the second sample's begin
    path.write_bytes(data)
    with pytest.raises(ValueError, match="shard.00000.mds: sample 1 is damaged .*; delete the file"):
        make_loader(True, fast).dataset[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_cannot_be_fetched_is_an_error(tmp_path, plain, workers):
    """streaming alone ends the epoch early, or waits for ever for a shard that another worker could not fetch."""
    remote = tmp_path / "remote"
    shutil.copytree(plain, remote)
    stream = {"local": str(tmp_path / "local"), "remote": str(remote), "download_retry": 1}
    loader = make_loader(True, [stream], workers, predownload=4)
    next(remote.glob("*3.mds")).unlink()
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="data: a shard could not be fetched .*shard.00003.mds") as error:
        list(loader)
    assert "\n" not in str(error.value)
    assert set(multiprocessing.active_children()) <= before


def test_a_flipped_byte_is_found_at_the_first_read(latent_sets, tmp_path):
    """In a pixel of a latent, which any bytes are valid for."""
    folder = tmp_path / "set"
    shutil.copytree(latent_sets / "val", folder)
    (file,) = (folder / "shards").glob("*/*.mds")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def opened(check):
        streams = streams_of({"val": local_set(path=str(folder), validate_hash=check)})
        return LatentDataset(streams=streams, resolution=16, text="text", batch_size=2, shuffle=False)

    def read(check):
        dataset = opened(check)
        return [dataset[i] for i in range(len(dataset))]

    assert len(read(None)) == 6
    loader = open_loader(opened("xxh3_64"), Placement(2, training=False), 1, False)
    for broken in (lambda: read("xxh3_64"), lambda: list(loader)):  # in this process, and in a worker
        with pytest.raises(ValueError, match=f"^{file}: damaged, its xxh3_64 is") as error:
            broken()
        assert "\n" not in str(error.value)
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert len(read("xxh3_64")) == 6
    with pytest.raises(ValueError, match="validate_hash is sha1, and the set was written with xxh3_64"):
        read("sha1")


def test_workers_leave_signals_to_the_trainer(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    loader = make_loader(True, fast, workers=1)
    assert loader.worker_init_fn is leave_signals and loader.timeout == LONGEST_WAIT  # of one that is lost
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        leave_signals(0)
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    finally:
        end_with_parent(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_end_of_a_worker_is_noticed_also_where_pytorchs_error_was_lost(tmp_path, plain, monkeypatch):
    """PyTorch would look after the workers when `LONGEST_WAIT` is over."""
    monkeypatch.setattr("data.encoded.dataset.MP_STATUS_CHECK_INTERVAL", 0.1, raising=False)
    batches = iter(loader := make_loader(True, copies(tmp_path, plain)[0], workers=2))
    next(batches)
    workers, queue = loader._iterator._workers, loader._iterator._data_queue
    with contextlib.suppress(RuntimeError):
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0].join()
    get = queue.get
    monkeypatch.setattr(
        queue, "get", lambda timeout: get(timeout=timeout) if timeout < 1 else pytest.fail(f"waits for {timeout} s")
    )
    with pytest.raises(RuntimeError, match=rf"worker \(pid\(s\) {workers[0].pid}\) exited unexpectedly"):
        list(batches)


def test_processes_that_divide_a_model_read_the_same_samples():
    """What streaming calls replication."""
    options = {"shuffle": True, "shuffle_algo": "py1e", "shuffle_block": None}
    options |= {"predownload": None, "cache_limit": None, "epoch_size": None}
    for copies, replication in ((1, None), (4, 4)):
        placement = Placement(8, training=True, copies=copies)
        assert dataset_arguments("latents", {}, placement, 0, **options)["replication"] == replication
