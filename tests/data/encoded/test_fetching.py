"""Shards that are evicted while a worker waits for them, and shards that cannot be fetched: nobody waits for ever.
Opening a set reads its index once."""

import json
import os
import threading
from itertools import islice

import pytest
from streaming import MDSWriter, StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.world import World

from data.encoded.fetching import FetchingDataset, NotFetched, WholeStream
from data.encoded.shard_places import ShardPlaces
from data.encoded.shared_names import own_names
from data.remote.downloads import fetch

SAMPLES = 12
COLUMNS = {"number": "int", "filler": "bytes"}


def write_set(folder, samples=SAMPLES, compression=None):
    """A set of several shards."""
    options = {"size_limit": 1500, "hashes": ["sha1"], "compression": compression}
    with MDSWriter(out=str(folder), columns=COLUMNS, **options) as writer:
        for number in range(samples):
            writer.write({"number": number, "filler": bytes(300)})
    return folder


def open_compressed(folder):
    """A compressed set that is nowhere else."""
    with own_names():
        return FetchingDataset(streams=[WholeStream(local=str(folder))], batch_size=4)


@pytest.fixture
def remote(tmp_path):
    return write_set(tmp_path / "remote")


@pytest.fixture
def open_set(tmp_path, remote, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def open_set(**arguments):
        with own_names():
            places = {"local": str(tmp_path / "cache"), "remote": str(remote)}
            return FetchingDataset(streams=[WholeStream(**places)], batch_size=4, **arguments)

    return open_set


def test_a_shard_that_was_evicted_before_it_was_seen_is_fetched_again(open_set):
    dataset = open_set()
    assert dataset.num_shards > 1
    found = []
    dataset._shard_states[0] = _ShardState.PREPARING  # another worker fetches it
    reading = threading.Thread(target=lambda: found.extend(sample["number"] for sample in dataset), daemon=True)
    reading.start()
    reading.join(0.3)
    assert reading.is_alive() and not found  # it waits
    dataset._shard_states[0] = _ShardState.REMOTE  # it was here, and a third one has evicted it
    reading.join(60)
    assert found == list(range(SAMPLES))


def test_data_sets_with_one_cache_do_not_fetch_a_shard_at_the_same_time(open_set, monkeypatch):
    """One gave the file its name that the other still wrote: reading it failed, or the other's renaming."""
    first, second = open_set(), open_set()
    fetched, both = [], threading.Event()

    def slow(address, *arguments):
        fetched.append(address)
        if len(fetched) > 1:
            both.set()
        both.wait(1)
        return fetch(address, *arguments)

    monkeypatch.setattr("data.encoded.fetching.fetch", slow)
    reading = [threading.Thread(target=dataset.prepare_shard, args=[0]) for dataset in (first, second)]
    for thread in reading:
        thread.start()
    for thread in reading:
        thread.join()
    assert len(fetched) == 1
    assert first._shard_states[0] == second._shard_states[0] == _ShardState.LOCAL
    assert first[0]["number"] == second[0]["number"] == 0


def test_a_shard_is_prepared_once_and_not_for_each_sample(open_set, tmp_path, monkeypatch):
    """streaming takes a lock that all processes of the machine share each time."""
    prepared, prepare = [], StreamingDataset.prepare_shard

    def count(dataset, shard, blocking=True):
        prepared.append(int(shard))
        prepare(dataset, shard, blocking)

    monkeypatch.setattr(StreamingDataset, "prepare_shard", count)
    dataset = open_set()
    assert [sample["number"] for sample in dataset] == list(range(SAMPLES))
    assert set(prepared) == set(range(dataset.num_shards))
    first = len(prepared)  # while one thread prepares a shard, another one may ask for it again and again
    assert [sample["number"] for sample in dataset] == list(range(SAMPLES))
    assert len(prepared) == first
    before = dataset._shard_access_times[0]
    dataset.prepare_shard(0, blocking=False)
    assert dataset._shard_access_times[0] > before  # it is not the next one to be evicted
    dataset.evict_shard(0)
    assert not (tmp_path / "cache" / dataset.shards[0].raw_data.basename).exists()
    dataset.prepare_shard(0, blocking=False)
    assert dataset[0]["number"] == 0 and prepared[-1] == 0


def test_a_set_that_is_nowhere_else_is_neither_evicted_nor_listed(open_set, remote, tmp_path, monkeypatch):
    """streaming takes its folder for a cache, and removes its shards to make room for those of others."""
    wide, walk, listed = write_set(tmp_path / "wide", 4 * SAMPLES), os.walk, []
    before = sorted(remote.iterdir())
    monkeypatch.setattr(os, "walk", lambda folder: listed.append(folder) or walk(folder))
    largest = max(file.stat().st_size for file in wide.glob("*.mds"))
    limit = sum((folder / "index.json").stat().st_size for folder in (remote, wide)) + 4 * largest
    places = {"local": str(tmp_path / "cache"), "remote": str(wide)}, {"local": str(remote)}
    with own_names():
        streams = [WholeStream(**place) for place in places]
        dataset = FetchingDataset(streams=streams, batch_size=4, cache_limit=limit, predownload=4)
    assert len(list(dataset)) == 5 * SAMPLES
    # streaming's two threads look for room before either has added its shard to what is taken.
    assert len(list(wide.glob("*.mds"))) > 2 * 5 and len(list((tmp_path / "cache").glob("*.mds"))) <= 4 + 1
    assert sorted(remote.iterdir()) == before and listed == [str(tmp_path / "cache") + "/"]


@pytest.mark.parametrize("whole", [True, False], ids=["read to the end", "left after the last sample"])
def test_nothing_of_an_epochs_size_is_kept_until_the_process_ends(open_set, whole):
    """A loader without workers does not look behind a last batch that is full."""
    dataset = open_set()
    before = set(map(id, threading._threading_atexits))
    for _ in range(3):
        samples = iter(dataset)
        assert len(list(samples if whole else islice(samples, SAMPLES))) == SAMPLES
        del samples
    # functools.partial of a method of the iterator of an epoch
    kept = [call.func.__self__ for call in threading._threading_atexits if id(call) not in before]
    kept = [iterator for iterator in kept if hasattr(iterator, "sample_ids")]
    assert len(kept) == 3 and all(iterator.sample_ids.base is None for iterator in kept)
    order = SAMPLES * kept[0].sample_ids.itemsize
    assert sum(iterator.sample_ids.nbytes for iterator in kept) == (0 if whole else order)  # of the last one at most


def test_a_shard_that_cannot_be_fetched_is_an_error_each_time(open_set, remote):
    dataset = open_set()
    shard = remote / dataset.shards[0].raw_data.basename
    whole = shard.read_bytes()
    shard.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            dataset.prepare_shard(0)
    shard.write_bytes(whole)
    dataset.prepare_shard(0)
    assert dataset[0]["number"] == 0
    (remote / dataset.shards[1].raw_data.basename).unlink()
    with pytest.raises(NotFetched, match="a shard could not be fetched or decompressed: shard.00001.mds"):
        list(dataset)


def test_ranks_wait_for_all_attempts_to_fetch_an_index(remote, tmp_path):
    """streaming lets them wait for as long as one attempt may take without a byte."""
    cache = tmp_path / "cache"
    stream = WholeStream(local=str(cache), remote=str(remote), download_timeout=0.05)
    fetching = threading.Timer(0.2, os.symlink, (remote / "index.json", cache / "index.json"))
    cache.mkdir(exist_ok=True)
    fetching.start()
    world = World(num_nodes=1, ranks_per_node=2, workers_per_rank=1, worker=1)
    assert len(stream.get_shards(world, False)) == 3 and stream.download_timeout == 0.05


def test_a_file_is_in_the_cache_whole_or_not_at_all(open_set, tmp_path, monkeypatch):
    """Also where a client writes to the file that it is given, as Google's does, and the connection breaks."""
    dataset = open_set()
    stream, name = dataset.streams[0], dataset.shards[0].raw_data.basename
    fetch, attempts = stream._downloader.download, []

    def break_off(remote, local, timeout):
        attempts.append(local)
        if not os.path.exists(local):  # streaming's downloaders take a file that is there for whole
            fetch(remote, local, timeout)
            if len(attempts) == 1:
                os.truncate(local, 100)
                raise ConnectionError("broken off")

    monkeypatch.setattr(stream._downloader, "download", break_off)
    (tmp_path / "cache" / f"{name}.part").write_bytes(bytes(100))  # of a process that was killed
    dataset.prepare_shard(0)
    assert len(attempts) == 2 and dataset[0]["number"] == 0
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_shard_with_another_hash_is_not_kept(open_set, remote, tmp_path):
    dataset = open_set(validate_hash="sha1")
    name = dataset.shards[0].raw_data.basename
    whole = (remote / name).read_bytes()
    (remote / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(ValueError, match="Checksum failure"):
            dataset.prepare_shard(0)
    assert not (tmp_path / "cache" / name).exists()
    (remote / name).write_bytes(whole)
    dataset.prepare_shard(0)
    assert dataset[0]["number"] == 0 and dataset.cache_usage > 0


def test_a_shard_that_two_machines_decompress_at_the_same_time(tmp_path, monkeypatch):
    """Into a folder that they share; or two runs on one machine do."""
    dataset, rename, others = open_compressed(write_set(tmp_path, 1, compression="zstd")), os.rename, []
    (shard,) = dataset.shards

    def after_the_other(source, target):
        if not others:
            others.append(os.fork())
            if not others[0]:
                try:
                    dataset.streams[0].prepare_shard(shard)
                finally:
                    os._exit(0)
            os.waitpid(others[0], 0)
            assert os.path.isfile(tmp_path / shard.raw_data.basename)
        rename(source, target)

    monkeypatch.setattr(os, "rename", after_the_other)
    dataset.streams[0].prepare_shard(shard)
    assert shard[0]["number"] == 0 and others
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", "shard.00000.mds", "shard.00000.mds.zstd"}


def test_what_a_process_left_that_was_killed_while_it_decompressed_is_removed(tmp_path):
    dataset = open_compressed(write_set(tmp_path, 1, compression="zstd"))
    for name in "1", "1.tmp", "2":
        (tmp_path / f".shard.00000.mds.node.{name}").touch()
    for path in tmp_path.glob(".*node.1*"):
        os.utime(path, (1, 1))
    assert len(list(dataset)) == 1
    assert [path.name for path in tmp_path.glob(".*")] == [".shard.00000.mds.node.2"]  # which may be at work


def test_a_set_whose_compressed_files_were_removed_is_read(tmp_path):
    """To make room, after all were decompressed. streaming would remove the others, too."""
    write_set(tmp_path, compression="zstd")
    assert len(list(open_compressed(tmp_path))) == SAMPLES
    for path in tmp_path.glob("*.zstd"):
        path.unlink()
    assert [sample["number"] for sample in open_compressed(tmp_path)] == list(range(SAMPLES))


def test_a_set_that_is_nowhere_else_takes_no_room_in_the_cache_when_it_is_decompressed(tmp_path, remote):
    local = write_set(tmp_path / "local", 4 * SAMPLES, compression="zstd")
    largest = max(file.stat().st_size for file in remote.glob("*.mds"))
    indexes = sum((folder / "index.json").stat().st_size for folder in (remote, local))
    with own_names():
        streams = [WholeStream(local=str(local)), WholeStream(local=str(tmp_path / "cache"), remote=str(remote))]
        dataset = FetchingDataset(streams=streams, batch_size=4, cache_limit=indexes + 4 * largest, predownload=4)
    assert len(list(dataset)) == 5 * SAMPLES
    assert len(list(local.glob("*.mds"))) > 4
    assert dataset.cache_usage == indexes + sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.mds"))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_an_index_is_parsed_once_into_the_readers_of_streaming(tmp_path, monkeypatch, compression):
    """A set may have a million files, and each rank opens all of its sets."""
    write_set(tmp_path / "set", compression=compression)
    known = StreamingDataset(local=str(tmp_path / "set"), batch_size=1).shards
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    with own_names():
        dataset = FetchingDataset(streams=[WholeStream(local=str(tmp_path / "set"))], batch_size=4)
    assert len(parsed) == 1 and isinstance(dataset.spanner, ShardPlaces)
    assert [vars(shard) | {"size_limit": 1500} for shard in dataset.shards] == [vars(shard) for shard in known]
    for name in "column_names", "column_encodings", "column_sizes", "hashes":
        assert len({id(getattr(shard, name)) for shard in dataset.shards}) == 1 < len(dataset.shards)


def test_of_an_unsafe_column_no_set_is_opened(tmp_path):
    for number, columns in enumerate([{"number": "int"}, {"number": "pkl"}]):
        with MDSWriter(out=str(tmp_path / str(number)), columns=columns) as writer:
            writer.write({"number": 1})
    entries = []
    for number in range(2):
        entries += json.loads((tmp_path / f"{number}/index.json").read_text())["shards"]
        entries[-1]["raw_data"]["basename"] = f"{number}/{entries[-1]['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    with own_names(), pytest.raises(ValueError, match="contains an unsafe type: pkl"):
        FetchingDataset(streams=[WholeStream(local=str(tmp_path))], batch_size=4)
