"""A source without the images of a list that precompute/scores.py --shared made; tests/precompute makes a real one."""

import json

import pytest

from data.sources.base import Rejected, Sample
from data.sources.unshared import UnsharedSource


class Inner:
    """Two shards, whose samples partly have the same keys, and one that is broken."""

    def shards(self):
        return ["a", "b"]

    def read(self, shard):
        yield from (Sample(key, b"", f"{shard} {key}") for key in ("0", "1", "2"))
        yield Rejected("3", "broken_shard")


def pair(shard, key, similarity):
    return {"similarity": similarity, "image": {"shard": shard, "key": key}, "other": {"shard": "t", "key": "9"}}


PAIRS = [
    pair("a", "1", 0.99),
    pair("b", "0", 0.97),
    pair("a", "1", 0.96),  # the same image beside another one
    pair("b", "3", 0.95),
    pair("gone", "0", 0.95),
]


@pytest.fixture
def listed(tmp_path):
    """Writes a list and gives its path."""

    def make(**changes):
        file = tmp_path / "shared.json"
        file.write_text(json.dumps({"set": "val", "in": "train", "threshold": 0.95, "pairs": PAIRS} | changes))
        return str(file)

    return make


def read(source):
    return {shard: {row.key: getattr(row, "reason", None) for row in source.read(shard)} for shard in source.shards()}


@pytest.mark.parametrize(
    ("at_least", "gone"),
    [
        (None, {("a", "1"), ("b", "0")}),
        (0.95, {("a", "1"), ("b", "0")}),
        (0.97, {("a", "1"), ("b", "0")}),
        (0.98, {("a", "1")}),
        (1, set()),
    ],
)
def test_images_of_the_list_are_rejected_and_no_others(listed, at_least, gone):
    found = read(UnsharedSource(source=Inner(), shared=listed(), at_least=at_least))
    for shard in ("a", "b"):
        reasons = {key: "shared_image" if (shard, key) in gone else None for key in ("0", "1", "2")}
        assert found[shard] == reasons | {"3": "broken_shard"}  # what cannot be read keeps its own reason


def test_a_rejected_image_names_its_largest_similarity(listed):
    rows = UnsharedSource(source=Inner(), shared=listed()).read("a")
    assert [row.detail for row in rows if isinstance(row, Rejected) and row.reason == "shared_image"] == ["0.9900"]


def test_a_list_of_no_image_leaves_all(listed):
    found = read(UnsharedSource(source=Inner(), shared=listed(pairs=[])))
    assert not {reason for rows in found.values() for reason in rows.values()} - {None, "broken_shard"}


def test_a_list_of_another_source_is_refused(listed):
    """Its images would otherwise stay without a word, as with tars that are named by other paths."""
    source = UnsharedSource(source=Inner(), shared=listed(pairs=[pair("val-1234", "0", 0.99)]))
    with pytest.raises(ValueError, match="source.shared: .*shared.json is of other shards, such as val-1234; give the"):
        source.shards()


@pytest.mark.parametrize("pairs", [PAIRS, []])
def test_shards_that_the_list_was_made_without_are_refused(listed, pairs):
    """Tars that were added since: the images that they share would stay without a word."""
    source = UnsharedSource(source=Inner(), shared=listed(pairs=pairs, shards=["a"]))
    message = "source.shared: .*shared.json was made without 1 of the source's 2 shards, such as b; make it again with"
    with pytest.raises(ValueError, match=message):
        source.shards()
    for shards in ["b", "a"], ["gone", "a", "b"]:  # a source may have lost some
        assert UnsharedSource(source=Inner(), shared=listed(pairs=pairs, shards=shards)).shards() == ["a", "b"]
    with pytest.raises(ValueError, match="source.shared: .*shared.json is of other shards, such as c; give the"):
        UnsharedSource(source=Inner(), shared=listed(pairs=pairs, shards=["c"])).shards()


@pytest.mark.parametrize("at_least", [0.9, 1.5, float("nan")])
def test_similarities_that_the_list_does_not_have(listed, at_least):
    with pytest.raises(ValueError, match="source.at_least: .*; give 0.95 to 1, because .* a threshold of 0.95"):
        UnsharedSource(source=Inner(), shared=listed(), at_least=at_least)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"threshold": 0.9}', '{"threshold": 0.9, "pairs": 3}', '{"threshold": 0.9, "pairs": [3]}',
     '{"threshold": null, "pairs": []}', '{"threshold": 0.9, "pairs": [{"similarity": "x", "image": {}}]}',
     '{"threshold": 0.9, "pairs": [{"similarity": 0.9, "image": {"shard": "a"}}]}',
     '{"threshold": 0.9, "pairs": [], "shards": 3}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_list_is_named_in_a_line(tmp_path, content):
    (tmp_path / "shared.json").write_text(content)
    with pytest.raises(ValueError, match="shared.json: damaged .*; make it again with precompute/scores.py") as error:
        UnsharedSource(source=Inner(), shared=str(tmp_path / "shared.json"))
    assert "\n" not in str(error.value)


def test_a_list_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*/shared.json; make it with precompute/scores.py --shared"):
        UnsharedSource(source=Inner(), shared=str(tmp_path / "shared.json"))
