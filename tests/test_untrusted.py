"""Files that nobody should trust: whatever their bytes are, they are read, or refused in one line, and no code runs."""

import json
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.encoded.manifest import Manifest
from data.encoded.mds_index import read_index
from data.sources.base import Rejected, Sample
from data.sources.mds import MDSSource
from recipes.config.recipe import Recipe, load_config
from tests.data.encoded.test_manifest import manifest, tokens
from tests.fuzzing import changed_bytes, changed_json, few, reads_or_refuses, values

ROOT = Path(__file__).resolve().parents[1]

# --- manifests and indexes ---------------------------------------------------------------------------------------


def use(read: Manifest) -> None:
    """What a recipe does with a manifest."""
    read.check(kind=read.kind, resolution=read.resolutions[0] if read.resolutions else None, image_weights="a" * 64)
    read.side(256)
    if read.kind == "latents":
        read.latent_shape(256)


@few
@given(st.data())
def test_manifests(tmp_path, data):
    manifest().write(tmp_path)
    whole = json.loads((tmp_path / "manifest.json").read_text())
    tree = data.draw(changed_json(whole) | values)
    found = reads_or_refuses(Manifest.parse, json.dumps(tree))
    if found is not None:
        reads_or_refuses(use, found)
    reads_or_refuses(Manifest.parse, data.draw(st.text()))


def test_a_manifest_that_nests_deeply_and_encoders_that_say_too_little():
    reads_or_refuses(Manifest.parse, "[" * 100_000)
    for whole, name, field in (
        (manifest(), "image_encoder", "channels"),
        (tokens(), "image_encoder", "codes"),
        (manifest(), "text_encoder", "component"),
    ):
        values = {**vars(whole), name: {**getattr(whole, name), field: "many"}}
        del values["where"]
        with pytest.raises(ValueError, match=f"{name}.{field} is 'many'"):
            Manifest.parse(json.dumps(values))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A small folder of one MDS shard."""
    from streaming import MDSWriter

    folder = tmp_path_factory.mktemp("mds") / "set"
    columns = {"key": "str", "caption": "str", "image": "bytes", "mean": "ndarray:float16:2,2"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for number in range(3):
            mean = np.full((2, 2), number, np.float16)
            writer.write({"key": str(number), "caption": "a dot", "image": b"x" * number, "mean": mean})
    return folder


@few
@given(st.data())
def test_indexes(shards, tmp_path, data):
    tree = data.draw(changed_json(json.loads((shards / "index.json").read_text())) | values)
    (tmp_path / "index.json").write_text(json.dumps(tree))
    entries = reads_or_refuses(read_index, tmp_path)
    for entry in entries or []:
        assert 4 * (entry["samples"] + 1) <= entry["raw_data"]["bytes"]
    shutil.copyfile(shards / "shard.00000.mds", tmp_path / "shard.00000.mds")
    source = reads_or_refuses(lambda: MDSSource(path=str(tmp_path)))
    for shard in source.shards() if source else ():
        samples = reads_or_refuses(lambda shard=shard: list(source.read(shard)))
        assert all(isinstance(sample, Sample | Rejected) for sample in samples or [])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "/index.json: not JSON"),
        ('{"version": 2}', "/index.json: not the index of MDS shards"),
        ('{"shards": []}', "/index.json: not the index of MDS shards"),
        ('{"version": 2, "shards": []}', ": a set without samples"),
        ('{"version": 2, "shards": [3]}', "/index.json: shard 0: is 3"),
        ('{"version": 2, "shards": [{"format": "mds", "version": 2}]}', "/index.json: shard 0: column_names"),
        ('{"version": 2, "shards": [ENTRY, {"format": "mds", "version": 2}]}', "/index.json: shard 1: column_names"),
        ('{"version": 2, "shards": [ENTRY, {"column_names": [], "version": 2}]}', "/index.json: shard 1: is"),
        ('{"version": 2, "shards": [ENTRY, ENTRY]}', "/index.json: shard 1: names 'shard.00000.mds', as an earlier"),
    ],
)
def test_training_data_of_a_damaged_index(shards, tmp_path, text, fault):
    entry = json.dumps(json.loads((shards / "index.json").read_text())["shards"][0])
    (tmp_path / "index.json").write_text(text.replace("ENTRY", entry))
    with pytest.raises(ValueError, match=f"^{tmp_path}{fault}"):
        open_set(tmp_path)


@pytest.mark.parametrize("name", ["../shard.00000.mds", "/etc/shard.00000.mds"])
def test_training_data_of_an_index_that_names_files_elsewhere(shards, tmp_path, name):
    index = json.loads((shards / "index.json").read_text())
    assert len(open_set(shards)) == 3
    index["shards"][0]["raw_data"]["basename"] = name
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "index.json").write_text(json.dumps(index))
    shutil.copyfile(shards / "shard.00000.mds", tmp_path / "shard.00000.mds")
    with pytest.raises(ValueError, match="which leaves the folder"):
        open_set(tmp_path / "set")


def open_set(folder):
    from data.encoded.fetching import FetchingDataset, WholeStream

    return FetchingDataset(streams=[WholeStream(local=str(folder))], batch_size=1)


def test_samples_and_sizes_that_an_index_invents(shards, tmp_path):
    """Neither is a line written for each, nor memory taken."""
    from streaming.base.format import reader_from_json

    from data.encoded.column_reader import ColumnReader

    shutil.copyfile(shards / "shard.00000.mds", tmp_path / "shard.00000.mds")
    (entry,) = read_index(shards)
    many = {**entry, "samples": 10**9, "raw_data": {**entry["raw_data"], "bytes": (1 << 32) - 1}}
    large = {**entry, "raw_data": {**entry["raw_data"], "bytes": (1 << 32) - 1}}
    large["column_encodings"] = [text.replace("2,2", "200000,200000") for text in entry["column_encodings"]]
    for changed in (many, large):
        (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [changed]}))
        (read,) = read_index(tmp_path)
        with pytest.raises(ValueError, match="it has room for"):
            ColumnReader(reader_from_json(str(tmp_path), None, read), {"mean": "mean"})
        with pytest.raises(ValueError, match="it has room for"):  # before the file is fetched, too
            ColumnReader(reader_from_json(str(tmp_path / "none"), None, read), {"mean": "mean"})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [many]}))
    source = MDSSource(path=str(tmp_path))
    assert len(list(source.read(source.shards()[0]))) < 100


@few
@given(st.data())
def test_samples_of_shards(shards, tmp_path, data):
    from streaming.base.format import reader_from_json

    from data.encoded.column_reader import ColumnReader

    shutil.copyfile(shards / "index.json", tmp_path / "index.json")
    (tmp_path / "shard.00000.mds").write_bytes(data.draw(changed_bytes((shards / "shard.00000.mds").read_bytes())))
    (entry,) = read_index(tmp_path)
    shard = reader_from_json(str(tmp_path), None, entry)
    reader = reads_or_refuses(lambda: ColumnReader(shard, {"mean": "mean"}, ("key", "caption")))
    for number in range(3) if reader else ():
        reads_or_refuses(reader.get_item, number)
    source = MDSSource(path=str(tmp_path))
    (shard,) = source.shards()
    assert all(isinstance(sample, Sample | Rejected) for sample in source.read(shard))


@pytest.mark.parametrize("name", ["column_names", "column_encodings", "column_sizes", "hashes"])
def test_an_index_without_a_list(name, shards, tmp_path):
    index = json.loads((shards / "index.json").read_text())
    (entry,) = index["shards"]
    for entries in ([entry | {name: None}], [entry, entry | {name: None}]):
        (tmp_path / "index.json").write_text(json.dumps({**index, "shards": entries}))
        with pytest.raises(ValueError, match=f"index.json: shard {len(entries) - 1}: .*must be"):
            read_index(tmp_path)


@pytest.mark.parametrize(("samples", "size"), [(3, 1 << 32), (1 << 63, 1 << 70), (1 << 60, 1 << 62 | 4)])
def test_an_index_with_numbers_that_no_file_can_have(samples, size, shards, tmp_path):
    """Libraries raise an OverflowError or a MemoryError for them."""
    index = json.loads((shards / "index.json").read_text())
    index["shards"][0] |= {"samples": samples, "raw_data": index["shards"][0]["raw_data"] | {"bytes": size}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json: shard 0: .*; expected"):
        read_index(tmp_path)


@pytest.mark.parametrize("compression", ["lz4", "lz4:3", "", None])
def test_compressed_shards_that_no_library_reads(compression, shards, tmp_path):
    """Before any of them is read: a job would reject each, and have all of them done."""
    index = json.loads((shards / "index.json").read_text())
    index["shards"][0] |= {"compression": compression}
    index["shards"][0]["zip_data"] = index["shards"][0]["raw_data"] | {"basename": "shard.00000.mds.lz4"}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"index.json: shard 0: compression is {compression!r}, which is not read"):
        MDSSource(path=str(tmp_path))


def test_a_sample_that_claims_more_than_its_file_has_is_not_read(shards, tmp_path):
    from streaming.base.format import reader_from_json

    from data.encoded.column_reader import ColumnReader

    data = bytearray((shards / "shard.00000.mds").read_bytes())
    data[8:12] = struct.pack("<I", 0xFFFFFFF0)  # the end of the first sample
    (tmp_path / "shard.00000.mds").write_bytes(data)
    (entry,) = read_index(shards)
    reader = ColumnReader(reader_from_json(str(tmp_path), None, entry), {"mean": "mean"})
    with pytest.raises(ValueError, match="sample 0 is damaged .bytes .* to 4294967280 of a file of"):
        reader.get_item(0)


@pytest.mark.parametrize("encoding", ["ndarray:float16:a", "ndarray:nothing:2", "ndarray:float16:-2,2", "what:ever:2"])
def test_columns_of_no_known_encoding(encoding, shards):
    from streaming.base.format import reader_from_json

    from data.encoded.column_reader import ColumnReader

    (entry,) = read_index(shards)
    entry["column_encodings"][entry["column_names"].index("mean")] = encoding
    with pytest.raises(ValueError, match="column `mean` is"):
        ColumnReader(reader_from_json(str(shards), None, entry), {"mean": "mean"})


# --- configs and vocabularies ------------------------------------------------------------------------------


@few
@given(changed_bytes((ROOT / "yamls" / "openmoji_diffusion.yaml").read_bytes()) | st.binary(max_size=60))
def test_configs(tmp_path, data):
    (tmp_path / "c.yaml").write_bytes(data)
    try:
        load_config(tmp_path / "c.yaml", [], Recipe, [])
    except ValueError as error:
        assert all("\n" not in line for line in getattr(error, "lines", [str(error)]))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghij")),
        "a: &a [*a]",
        "a: " + "[" * 5000,
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!python/object/apply:os.system ['true']",
    ],
    ids=["bomb", "itself", "deep", "timestamp", "bool", "python"],
)
def test_yamls_that_were_made_to_hurt(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match="not readable as YAML"):
        load_config(tmp_path / "c.yaml", [], Recipe, [])


def test_yamls_read_no_variables_of_the_environment(tmp_path, monkeypatch):
    """An address with a credential would carry it to wherever it points."""
    monkeypatch.setenv("SECRET", "a-credential")
    (tmp_path / "c.yaml").write_text("run_name: x\noutput: ${oc.env:SECRET}\n")
    with pytest.raises(ValueError, match="output: Unsupported interpolation type oc.env; give the value itself"):
        load_config(tmp_path / "c.yaml", [], Recipe, [])


def test_yamls_of_many_keys(tmp_path):
    """If each was compared with each for keys that are given twice, it would take hours."""
    (tmp_path / "c.yaml").write_text("".join(f"k{number}: 1\n" for number in range(200_000)) + "k7: 1\n")
    with pytest.raises(ValueError, match="found duplicate key k7"):
        load_config(tmp_path / "c.yaml", [], Recipe, [])


@pytest.fixture(scope="module")
def vocabulary() -> dict:
    """A vocabulary file's JSON: the bytes and two merges."""
    from data.tokenizers.bpe_training import train

    return json.loads(train(["a dot on a wall"] * 3, 258).to_str())


@few
@given(st.data())
def test_vocabularies(vocabulary, tmp_path, data):
    from data.tokenizers.bpe import Vocabulary

    (tmp_path / "v.json").write_text(json.dumps(data.draw(changed_json(vocabulary) | values)))
    read = reads_or_refuses(Vocabulary.read, tmp_path / "v.json")
    if read is not None:
        read.encode("a dot on the wall")
    (tmp_path / "v.json").write_bytes(data.draw(st.binary(max_size=40)))
    reads_or_refuses(Vocabulary.read, tmp_path / "v.json")
