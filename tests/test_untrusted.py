"""Files that nobody should trust: whatever their bytes are, they are read, or refused in one line, and no code runs."""

import io
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.manifest import Manifest
from data.mds_index import read_index
from data.sources.base import Rejected, Sample
from data.sources.tars import TarSource
from recipes.config.recipe import Recipe, load_config
from tests.data.test_manifest import manifest, tokens

ROOT = Path(__file__).resolve().parents[1]
few = settings(
    max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def reads_or_refuses(read, *arguments):
    """What `read` returns, or None where it raises one of the two errors that users get in one line."""
    try:
        return read(*arguments)
    except (ValueError, FileNotFoundError) as error:
        assert str(error) and "\n" not in str(error)
        return None


@st.composite
def changed_bytes(draw, data: bytes):
    """`data` with a few bytes replaced, and sometimes cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


def changed_json(tree):
    """A JSON tree with one value replaced or removed, at any depth."""

    @st.composite
    def change(draw):
        copy = json.loads(json.dumps(tree))
        place = copy
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner and draw(st.booleans())):
                break
            place = inner
        if draw(st.booleans()):
            place[key] = draw(values)
        else:
            del place[key]
        return copy

    return change()


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
    for whole, name, field in ((manifest(), "image_encoder", "channels"), (tokens(), "image_encoder", "codes")):
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


@few
@given(st.data())
def test_samples_of_shards(shards, tmp_path, data):
    from streaming.base.format import reader_from_json

    from data.column_reader import ColumnReader
    from data.sources.mds import MDSSource

    shutil.copyfile(shards / "index.json", tmp_path / "index.json")
    (tmp_path / "shard.00000.mds").write_bytes(data.draw(changed_bytes((shards / "shard.00000.mds").read_bytes())))
    (entry,) = read_index(tmp_path)
    reader = ColumnReader(reader_from_json(str(tmp_path), None, entry), {"mean": "mean"}, ("key", "caption"))
    for number in range(3):
        reads_or_refuses(reader.get_item, number)
    source = MDSSource(path=str(tmp_path))
    (shard,) = source.shards()
    assert all(isinstance(sample, Sample | Rejected) for sample in source.read(shard))


def test_a_sample_that_claims_more_than_its_file_has_is_not_read(shards, tmp_path):
    from streaming.base.format import reader_from_json

    from data.column_reader import ColumnReader

    data = bytearray((shards / "shard.00000.mds").read_bytes())
    data[8:12] = struct.pack("<I", 0xFFFFFFF0)  # the end of the first sample
    (tmp_path / "shard.00000.mds").write_bytes(data)
    (entry,) = read_index(shards)
    reader = ColumnReader(reader_from_json(str(tmp_path), None, entry), {"mean": "mean"})
    with pytest.raises(ValueError, match="sample 0 is damaged .bytes .* to 4294967280 of a file of"):
        reader.get_item(0)


@pytest.mark.parametrize("encoding", ["ndarray:float16:a", "ndarray:nothing:2", "ndarray:float16:-2,2", "what:ever:2"])
def test_columns_of_no_known_encoding(encoding, shards, tmp_path):
    from streaming.base.format import reader_from_json

    from data.column_reader import ColumnReader

    (entry,) = read_index(shards)
    entry["column_encodings"][entry["column_names"].index("mean")] = encoding
    with pytest.raises(ValueError, match="column `mean` is"):
        ColumnReader(reader_from_json(str(shards), None, entry), {"mean": "mean"})


# --- tars --------------------------------------------------------------------------------------------------------


def small_tar(**more: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in {"a.png": b"png", "a.txt": b"a dot", "b.png": b"png", "b.txt": b"\xff", **more}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def read_tar(path: Path, data: bytes) -> list:
    path.write_bytes(data)
    source = TarSource(urls=str(path))
    return list(source.read(source.shards()[0]))


@few
@given(changed_bytes(small_tar(**{"é" * 99 + ".txt": b"x", "c.json": b"{"}).rstrip(b"\0")))
def test_members_of_tars(tmp_path, data):
    found = reads_or_refuses(read_tar, tmp_path / "t.tar", data)
    assert all(isinstance(sample, Sample | Rejected) for sample in found or [])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_name_of_gigabytes_is_not_read(kind, tmp_path):
    header = tarfile.TarInfo("name")
    header.type, header.size = kind, 1 << 32
    before = small_tar()[: 4 * 1024]
    (broken,) = [s for s in read_tar(tmp_path / "t.tar", before + header.tobuf(tarfile.GNU_FORMAT)) if s.key == "t.tar"]
    assert broken.reason == "broken_shard" and "a name of 4,294,967,296 bytes" in broken.detail


def with_number(data, at, value):
    """Bytes with another number in the place of one that takes as many bytes in Thrift's compact protocol."""
    value, length = 2 * value, next(n for n in range(1, 6) if data[at + n - 1] < 128)
    number = bytes((value >> 7 * n) & 127 | (128 if n + 1 < length else 0) for n in range(length))
    assert value >> 7 * length == 0
    return data[:at] + number + data[at + length :]


def test_pages_of_parquet_that_claim_too_much_are_refused_before_they_are_read(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.sources.base import Rejected
    from data.sources.parquet import ParquetSource

    file = tmp_path / "t.parquet"
    images = [{"bytes": b"%06d" % n * 100, "path": None} for n in range(400)]
    table = pa.table({"image": images, "text": [f"caption {n}" for n in range(400)]})
    pq.write_table(table, file, compression="zstd", row_group_size=200, use_dictionary=["text"])
    (shard,) = ParquetSource(path=str(file)).shards()
    assert [s.caption for s in ParquetSource(path=str(file)).read(shard)] == table["text"].to_pylist()
    whole = file.read_bytes()
    chunks = [pq.ParquetFile(file).metadata.row_group(0).column(n) for n in (0, 2)]
    assert [chunk.path_in_schema for chunk in chunks] == ["image.bytes", "text"]
    # A header begins with its type and size, 15 xx 15; that of a dictionary goes on with its size in the file (two
    # bytes here) and its number of entries.
    page, dictionary = chunks[0].data_page_offset, chunks[1].dictionary_page_offset
    entries = whole.index(b"\x4c\x15", dictionary) + 2
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was read"))
    for name, data, text in (
        ("page", with_number(whole, page + 3, 1_000_000), "column image.bytes: a page .* 1,000,000 uncompressed"),
        ("dictionary", with_number(whole, entries, 8000), "column text: a dictionary at byte .* claims 8,000 entries"),
        ("nothing", whole[:page] + b"\xff" * 20 + whole[page + 20 :], "column image.bytes: type 15"),
    ):
        file.write_bytes(data)
        found = list(ParquetSource(path=str(file)).read(shard))
        assert [type(sample) for sample in found] == [Rejected], name
        assert found[0].reason == "broken_shard" and re.search(text, found[0].detail), found


@few
@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_of_parquet_or_an_error(data):
    from data.sources.parquet_pages import DEEPEST, _structure

    try:
        fields, end = _structure(data, 0, DEEPEST)
    except (ValueError, IndexError):
        return
    assert 0 < end <= len(data) and all(isinstance(number, int) for number in fields)


def test_parquet_cells_larger_than_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.sources import parquet

    pq.write_table(pa.table({"image": [b"x" * 5000] * 3, "text": ["a", "b", "c"]}), tmp_path / "t.parquet")
    source = parquet.ParquetSource(path=str(tmp_path))
    assert len(list(source.read(source.shards()[0]))) == 3
    monkeypatch.setattr(parquet, "MEMORY", 4000)
    with pytest.raises(ValueError, match="t.parquet: row group 0 claims .* smaller row groups"):
        parquet.ParquetSource(path=str(tmp_path))


# --- configs, vocabularies, exports ------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def vocabulary() -> dict:
    """A vocabulary file's JSON: the bytes and two merges."""
    from data.bpe_training import train

    return json.loads(train(["a dot on a wall"] * 3, 258).to_str())


@few
@given(st.data())
def test_vocabularies(vocabulary, tmp_path, data):
    from data.bpe import Vocabulary

    (tmp_path / "v.json").write_text(json.dumps(data.draw(changed_json(vocabulary) | values)))
    read = reads_or_refuses(Vocabulary.read, tmp_path / "v.json")
    if read is not None:
        read.encode("a dot on the wall")
    (tmp_path / "v.json").write_bytes(data.draw(st.binary(max_size=40)))
    reads_or_refuses(Vocabulary.read, tmp_path / "v.json")


@few
@given(st.data())
def test_exports(tmp_path, data):
    from recipes.generation.exports import find_export

    record = {"family": "latent_diffusion", "network": "unet"}
    (tmp_path / "export.json").write_text(json.dumps(data.draw(changed_json(record) | values)))
    reads_or_refuses(find_export, tmp_path)
    (tmp_path / "export.json").write_bytes(data.draw(st.binary(max_size=20)))
    reads_or_refuses(find_export, tmp_path)


# --- weights and checkpoints -------------------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


@few
@given(st.data())
def test_files_of_weights(tmp_path, data):
    import torch
    from safetensors.torch import save

    from recipes.models.weights import read_tensors

    tensors = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    (tmp_path / "w.safetensors").write_bytes(data.draw(changed_bytes(save(tensors))))
    reads_or_refuses(read_tensors, tmp_path / "w.safetensors")
    pickled = io.BytesIO()
    torch.save(tensors, pickled)
    (tmp_path / "w.pt").write_bytes(data.draw(changed_bytes(pickled.getvalue())))
    reads_or_refuses(read_tensors, tmp_path / "w.pt")


def test_bombs_in_weights_and_full_checkpoints_do_not_go_off(tmp_path):
    import torch

    from recipes.engines.conversion import read_composer
    from recipes.engines.lightning.checkpoint_format import read_file
    from recipes.engines.plain_pickles import load_plain
    from recipes.models.weights import read_tensors

    path, mark = tmp_path / "ep0-ba1-rank0.pt", tmp_path / "mark"
    for content in (Bomb(mark), {"state": {"timestamp": Bomb(mark)}}, {"format": Bomb(mark)}):
        torch.save(content, path)
        for read in (load_plain, read_composer, read_file, read_tensors):
            with pytest.raises(ValueError):
                read(path)
    path.write_bytes(pickle.dumps(Bomb(mark)))  # and a bare pickle
    for read in (load_plain, read_composer, read_file, read_tensors):
        with pytest.raises(ValueError):
            read(path)
    assert not mark.exists()
    with pytest.raises(FileExistsError):  # the bomb itself works
        mark.mkdir()
        pickle.loads(pickle.dumps(Bomb(mark)))


def test_bombs_in_sharded_checkpoints_do_not_go_off(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    from recipes.engines.conversion import read_parts

    mark = tmp_path / "mark"
    state = {"weights": {"w": torch.arange(6.0), "half": torch.ones(2, dtype=torch.bfloat16)}, "counts": {"batch": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    found = read_parts(tmp_path / "whole")
    assert found["counts"] == {"batch": 3} and torch.equal(found["weights"]["w"], torch.arange(6.0))

    dcp.save({**state, "extra": Bomb(mark)}, checkpoint_id=tmp_path / "value", no_dist=True)
    with pytest.raises(ValueError, match="not readable as a part of a checkpoint"):
        read_parts(tmp_path / "value")
    (tmp_path / "whole" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match="not what PyTorch writes"):
        read_parts(tmp_path / "whole")
    assert not mark.exists()


def test_composer_loads_no_code(tmp_path):
    import torch
    from composer.utils import checkpoint

    from recipes.engines.composer.trainer import own_unpickling

    mark = tmp_path / "mark"
    torch.save({"state": Bomb(mark)}, tmp_path / "c.pt")
    with own_unpickling(), pytest.raises(ValueError, match="not a checkpoint that this repository wrote"):
        checkpoint.safe_torch_load(tmp_path / "c.pt")
    assert not mark.exists()
