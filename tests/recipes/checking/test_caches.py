"""The room that the doctor asks for is the one in which no shard is fetched twice."""

from collections import Counter

import pytest
from streaming import MDSWriter

from data.encoded.fetching import FetchingDataset, WholeStream
from data.encoded.shared_names import own_names
from recipes.checking.encoded_sets import caches
from recipes.config.components import COMPONENTS
from recipes.config.values import Component

SAMPLES, AHEAD = 1200, 4


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """A set of 134 shards of 9 samples."""
    folder = tmp_path_factory.mktemp("remote")
    with MDSWriter(out=str(folder), columns={"filler": "bytes"}, size_limit=1200) as writer:
        for _ in range(SAMPLES):
            writer.write({"filler": bytes(100)})
    assert len(list(folder.glob("*.mds"))) == -(-SAMPLES // 9)
    return folder


@pytest.mark.parametrize(
    ("shards", "shuffled", "enough"),
    [
        (16, {}, False),  # the whole epoch is one block
        (16, {"shuffle_block": 200}, False),
        (32, {"shuffle_block": 200}, True),
        (32, {"shuffle_block": 200, "shuffle_algo": "py1br"}, False),
        (32, {"shuffle_block": 20, "shuffle_algo": "naive"}, False),
        (16, {"shuffle": False}, True),
        (140, {}, True),
    ],
)
def test_a_cache_that_is_large_enough_fetches_each_shard_once(
    small_recipe, remote, tmp_path, monkeypatch, shards, shuffled, enough
):
    fetched, download = Counter(), WholeStream._download_file

    def count(stream, name, *others):
        fetched[name] += 1
        return download(stream, name, *others)

    monkeypatch.setattr(WholeStream, "_download_file", count)
    size, index = (remote / "shard.00000.mds").stat().st_size, (remote / "index.json").stat().st_size
    streaming = {"shuffle_block": "shuffle_block_size"}
    options = {streaming.get(name, name): value for name, value in ({"shuffle": True} | shuffled).items()}
    with own_names():
        stream = WholeStream(local=str(tmp_path / "cache"), remote=str(remote))
        options |= {"cache_limit": index + shards * size, "predownload": AHEAD}
        dataset = FetchingDataset(streams=[stream], batch_size=4, **{"shuffle_algo": "py1e"} | options)
    assert len(list(dataset)) == SAMPLES
    del fetched["index.json"]
    assert (max(fetched.values()) == 1) == enough, max(fetched.values())

    recipe = small_recipe(tmp_path / "run")
    place = {"url": str(remote), "cache": str(tmp_path / "cache")}
    stream = Component("stream", "remote", place, COMPONENTS["stream"]["remote"], "data.streams.train")
    limit = {"cache_limit": f"{shards * size}b", "predownload": AHEAD}  # of real sets, the index is a small part
    recipe.data.args.update({"streams": {"train": stream}, "workers": 1, **limit, **shuffled})
    (found,) = caches(recipe)
    assert (found.level == "ok") == enough, found.text
