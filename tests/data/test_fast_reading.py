"""Latents read straight into a batch's memory, against streaming's own reading and torch's own collation."""

import gc
import os
import pickle
import shutil
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from streaming import MDSWriter, Stream, StreamingDataset
from torch.utils.data import DataLoader

from data.latents import LatentDataset
from data.mds_batches import Layout, OpenShards, layouts
from data.reading import key_seed
from data.shared_batches import BatchBlocks
from precompute.columns import LatentColumns
from precompute.writer import EncodedSample, ShardWriter, Storage

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


def write(folder: Path, count: int, seed: int = 0, sides=(32,), size_limit="4kb", compression=None) -> Path:
    """A set as the encode job writes one; latents at an eighth of each side."""
    rng = np.random.default_rng(seed)
    columns = LatentColumns({side: (4, side // 8, side // 8) for side in sides}, TEXT)
    writer = ShardWriter(folder, "a", columns, Storage(size_limit, compression), {})
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


def open_loader(fast: bool, streams: list[dict], workers: int = 0, blocks: int = 6, **arguments) -> DataLoader:
    arguments = {"batch_size": BATCH, "shuffle": True, "shuffle_seed": 3, **arguments}
    streams = [Stream(**stream) for stream in streams]
    if fast:
        dataset = LatentDataset(streams=streams, resolution=32, text="text", blocks=blocks, **arguments)
    else:
        dataset = Stock(streams=streams, **arguments)
    collate = {"collate_fn": dataset.read} if fast else {}
    return DataLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0, **collate)


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
    stock = open_loader(False, stock, shuffle_algo=algorithm, shuffle_block_size=16)
    fast = open_loader(True, fast, shuffle_algo=algorithm, shuffle_block_size=16)
    epochs = [list(fast), list(fast)]
    for epoch in epochs:
        assert_same(list(stock), epoch)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("blocks", [0, 2, 12])
def test_workers_give_the_same_batches(tmp_path, plain, workers, blocks):
    stock, fast = copies(tmp_path, plain)
    stock, fast = open_loader(False, stock, workers), open_loader(True, fast, workers, blocks)
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
    stock = open_loader(False, stock, workers, epoch_size=40)
    fast = open_loader(True, fast, workers, epoch_size=40)
    assert len({id(layout) for layout in fast.dataset.layouts}) == 2
    assert {len(layout.runs) for layout in fast.dataset.layouts} == {1, 3}  # skipped in a read, and between reads
    for _ in range(2):
        assert_same(list(stock), list(fast))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_remote_with_eviction(tmp_path, workers, compression):
    remote = write(tmp_path / "remote", 120, size_limit="2kb", compression=compression)
    shards = len(list(remote.glob("*.mds*")))
    loaders = []
    for name in ("stock", "fast"):
        stream = {"local": str(tmp_path / name), "remote": str(remote)}
        arguments = {"predownload": 8, "cache_limit": 40_000, "shuffle_block_size": 20}
        loaders.append(open_loader(name == "fast", [stream], workers, **arguments))
    for _ in range(2):
        assert_same(*map(list, loaders))
    left = list((tmp_path / "fast").glob("*.mds"))
    assert 0 < len(left) < shards // 2
    dataset = loaders[1].dataset
    if not workers:
        dataset.read([0])
        dataset.read([0])  # what the first one evicted is closed
        local = {shard for shard in range(shards) if Path(tmp_path, "fast", f"shard.{shard:05d}.mds").exists()}
        assert {n for n in range(shards) if n in dataset.files} <= local


def test_a_shard_evicted_before_it_is_read_is_fetched_again(tmp_path, plain):
    stock, fast = copies(tmp_path, plain)
    fast = [{"local": str(tmp_path / "cache"), "remote": fast[0]["local"]}]
    stock, fast = open_loader(False, stock, shuffle=False), open_loader(True, fast, shuffle=False).dataset
    fast.prepare_shard(0)
    fast.evict_shard(0)
    assert_same(list(stock)[:1], [fast.read(fast[:BATCH])])


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_in_mid_epoch(tmp_path, plain, workers):
    stock, fast = copies(tmp_path, plain)
    whole = open_loader(False, stock, workers)
    expected = [list(whole), list(whole)]

    first = open_loader(True, fast, workers)
    done = list(first)
    iterator = iter(first)
    done += [next(iterator) for _ in range(5)]
    state = first.dataset.state_dict(5 * BATCH, from_beginning=True)
    del iterator, first
    gc.collect()

    second = open_loader(True, fast, workers)
    second.dataset.load_state_dict(state)
    assert_same(expected[0] + expected[1], done + list(second))


def test_an_epoch_left_early_leaves_no_thread(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    loader = open_loader(True, fast, predownload=4)
    iterator = iter(loader)
    next(iterator)
    del iterator
    for _ in range(100):
        if loader.dataset._iterator._num_exited == 2:  # of its threads
            break
        sleep(0.05)
    else:
        pytest.fail("a thread still fetches")
    assert len(list(loader)) == 11


def test_the_training_component_uses_it(latent_sets):
    from data.encoded_sets import local_set
    from data.latents import latents
    from data.loading import Placement

    streams = {"train": local_set(path=str(latent_sets / "train"))}
    loading = latents(Placement(8, training=True), {}, streams=streams, resolution=32, workers=2)
    assert loading.loader.collate_fn == loading.loader.dataset.read
    assert loading.loader.dataset.blocks.count > 2
    batches = list(loading.loader)
    assert len(batches) == 40 // 8
    assert batches[0]["mean"].shape == (8, 4, 16, 16) and batches[0]["mean"].dtype == torch.float16


def rewrite(folder: Path, **columns: str) -> StreamingDataset:
    values = {"str": "a", "int": 1, "bytes": b"a", "ndarray:float16:1,2": np.zeros((1, 2), np.float16)}
    fixed = {"key": "str", "mean_32": "ndarray:float16:2", "std_32": "ndarray:float16:2", "text": "ndarray:float16:2"}
    columns = {**fixed, **columns}
    with MDSWriter(out=str(folder), columns={k: v for k, v in columns.items() if v}) as writer:
        writer.write({k: values.get(v, np.zeros(2, np.float16)) for k, v in columns.items() if v})
    return StreamingDataset(local=str(folder), batch_size=1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mean_32": "ndarray:float16"}, "shard.00000.mds: column `mean_32` is ndarray:float16, but batches are read"),
        ({"text": "ndarray"}, "column `text` is ndarray, but .* encode the set again"),
        ({"text": "bytes"}, "column `text` is bytes, but"),
        ({"text": "", "texts": "ndarray:float16:2"}, "no column `text`; did you mean texts?"),
        ({"key": "int"}, "column `key` is int, texts are read from str"),
        ({"notes": "str"}, "column `notes` of variable size is stored after `mean_32`"),
    ],
)
def test_refuses_columns_that_it_cannot_read(tmp_path, columns, message):
    dataset = rewrite(tmp_path / "set", **columns)
    with pytest.raises(ValueError, match=message):
        Layout.of(dataset.shards[0], {"mean": "mean_32", "std": "std_32", "text": "text"})


def test_refuses_streams_of_different_shapes(tmp_path):
    shards = rewrite(tmp_path / "a").shards + rewrite(tmp_path / "b", text="ndarray:float16:1,2").shards
    with pytest.raises(ValueError, match=r"b/shard.00000.mds: column `text` holds .*\(1, 2\).* other shards .*\(2,\)"):
        layouts(shards, {"mean": "mean_32", "std": "std_32", "text": "text"})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cut_shard_is_an_error(tmp_path, plain, workers):
    _, fast = copies(tmp_path, plain)
    loader = open_loader(True, fast, workers)
    os.truncate(Path(fast[0]["local"], "shard.00002.mds"), 100)
    with pytest.raises(ValueError, match=r"shard.00002.mds: 100 bytes that do not match its index.json"):
        list(loader)


def test_a_sample_that_is_not_whole_is_an_error(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    path = Path(fast[0]["local"], "shard.00000.mds")
    data = bytearray(path.read_bytes())
    data[8:12] = np.uint32(len(data) - 50).tobytes()  # the second sample's begin
    path.write_bytes(data)
    with pytest.raises(ValueError, match="shard.00000.mds: sample 1 is not whole"):
        open_loader(True, fast).dataset.read([1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_shard_that_cannot_be_fetched_is_an_error(tmp_path, plain):
    """streaming alone ends the epoch early."""
    remote = tmp_path / "remote"
    shutil.copytree(plain, remote)
    loader = open_loader(True, [{"local": str(tmp_path / "local"), "remote": str(remote), "download_retry": 1}])
    next(remote.glob("*3.mds")).unlink()
    with pytest.raises(RuntimeError, match="could not be fetched"):
        list(loader)


def test_few_shards_stay_open(tmp_path, plain):
    _, fast = copies(tmp_path, plain)
    dataset = open_loader(True, fast).dataset
    dataset.files = OpenShards(limit=2)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    expected = dataset.read(list(range(43)))
    assert len(dataset.files) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2
    order = np.random.default_rng(0).permutation(43)
    assert torch.equal(dataset.read(order.tolist())["text"], expected["text"][order])
    copy = pickle.loads(pickle.dumps(dataset.files))
    assert len(copy) == 0 and copy.limit == 2
    del dataset, copy
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


SPECS = {"a": ((3, 5), torch.float16), "b": ((3,), torch.int64)}


def received(blocks: BatchBlocks, monkeypatch) -> dict:
    """A batch made as in a worker, and what the parent gets of it."""
    monkeypatch.setattr("data.shared_batches.get_worker_info", lambda: object())
    batch = blocks.new(SPECS)
    batch["a"].copy_(torch.arange(15).view(3, 5))
    batch["b"].copy_(torch.arange(3))
    return pickle.loads(pickle.dumps(batch))


def test_a_block_is_used_again_after_its_last_tensor(monkeypatch):
    blocks = BatchBlocks(2, 256)
    batch = received(blocks, monkeypatch)
    other = received(blocks, monkeypatch)
    assert type(batch) is dict
    assert torch.equal(batch["a"], torch.arange(15).view(3, 5).half()) and torch.equal(batch["b"], torch.arange(3))
    assert blocks._take() is None
    view = batch["b"][1:]
    del batch
    assert blocks._take() is None and view.tolist() == [1, 2]
    del view
    assert blocks._take() == 0 and blocks._take() is None
    del other
    assert blocks._take() == 1


def test_a_batch_without_a_block_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr("data.shared_batches.get_worker_info", lambda: object())
    for blocks in (BatchBlocks(0, 256), pickle.loads(pickle.dumps(BatchBlocks(2, 256)))):
        batch = blocks.new(SPECS)
        assert type(batch) is dict and all(tensor.is_shared() for tensor in batch.values())
    large = {"a": ((5000,), torch.int64)}
    assert BatchBlocks(2, 256).new(large)["a"].shape == (5000,)


def test_a_forked_process_does_not_free_a_block(monkeypatch):
    blocks = BatchBlocks(1, 256)
    batch = received(blocks, monkeypatch)
    child = os.fork()
    if not child:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert blocks._take() is None and batch["b"].tolist() == [0, 1, 2]
