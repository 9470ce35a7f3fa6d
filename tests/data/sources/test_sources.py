"""data/sources: every layout gives the same samples; what is broken is named, never lost, never raised."""

import csv
import errno
import functools
import io
import json
import pickle
import re
import sys
import tarfile
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from data.sources.base import (
    REASONS,
    Rejected,
    Sample,
    assemble,
    rejected_line,
    samples_of,
    shard_id,
    shard_ids,
    shards_of,
)
from data.sources.folder import FolderSource
from data.sources.mds import MDSSource
from data.sources.parquet import ParquetSource
from data.sources.tars import TarSource
from data.sources.texts import TextSource
from data.system.errors import WrongResult
from data.system.memory import MEMORY


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number, 2 * number, 255)).save(buffer, "PNG")
    return buffer.getvalue()


ROWS = [(f"p{number:02d}", picture(number), f"caption {number}, ünïcode") for number in range(7)]


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def layout(rows=ROWS):
    for key, image, caption in rows:
        yield f"{key}.png", image
        yield f"{key}.txt", caption.encode()
        yield f"{key}.json", json.dumps({"number": int(key[1:])}).encode()


def tar_source(folder):
    write_tar(folder / "0.tar", layout(ROWS[:4]))
    write_tar(folder / "1.tar", layout(ROWS[4:]))
    return TarSource(urls=str(folder / "{0..1}.tar"))


def folder_source(folder, captions):
    for number, (key, image, caption) in enumerate(ROWS):
        (folder / f"{key}.png").write_bytes(image)
        if captions == "txt":
            (folder / f"{key}.txt").write_text(caption + "\n", "utf-8")
        elif captions == "captions.jsonl":
            with open(folder / captions, "a", encoding="utf-8") as file:
                file.write(json.dumps({"file_name": f"{key}.png", "text": caption, "number": number}) + "\n")
    if captions == "table.csv":
        with open(folder / captions, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("file", "caption"), *((f"{key}.png", caption) for key, _, caption in ROWS)])
    return FolderSource(path=str(folder), captions=captions, shard_size=3)


def parquet_source(folder, struct):
    images = [{"bytes": image, "path": None} if struct else image for _, image, _ in ROWS]
    table = pa.table({"id": [row[0] for row in ROWS], "image": images, "text": [row[2] for row in ROWS]})
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    return ParquetSource(path=str(folder), key="id", shard_size=3)


def mds_source(folder, encoding="bytes", **options):
    from streaming import MDSWriter

    columns = {"image": encoding, "caption": "str", "key": "str", "number": "int", "extra": "pkl"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=600, **options) as out:
        for number, (key, image, caption) in enumerate(ROWS):
            stored = image if encoding == "bytes" else Image.open(io.BytesIO(image))
            out.write({"image": stored, "caption": caption, "key": key, "number": number, "extra": _Bomb()})
    return MDSSource(path=str(folder / "mds"), key="key")


class _Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self):
        return sys.exit, ("a pickle was read",)


SOURCES = {
    "tars": tar_source,
    "folder, txt": functools.partial(folder_source, captions="txt"),
    "folder, jsonl": functools.partial(folder_source, captions="captions.jsonl"),
    "folder, csv": functools.partial(folder_source, captions="table.csv"),
    "parquet": functools.partial(parquet_source, struct=False),
    "parquet, hugging face": functools.partial(parquet_source, struct=True),
    "mds": mds_source,
    "mds, zstd": functools.partial(mds_source, compression="zstd:3"),
}


def read(source):
    return [row for shard in source.shards() for row in source.read(shard)]


def reasons(source):
    return {row.key: row.reason for row in read(source) if isinstance(row, Rejected)}


@pytest.mark.parametrize("name", SOURCES)
def test_all_layouts_give_the_same_samples(name, tmp_path):
    source = SOURCES[name](tmp_path)
    samples = read(source)
    assert [(row.key, row.image, row.caption.strip()) for row in samples] == ROWS
    shards = source.shards()
    assert len(shards) > 1 and len(set(shards)) == len(shards)
    assert all(set(shard) <= set("abcdefghijklmnopqrstuvwxyz_-0123456789") for shard in shards)
    again = pickle.loads(pickle.dumps(source))  # worker processes get it so
    assert again.shards() == shards and read(again) == samples
    with pytest.raises(ValueError, match="no shard 'nothing'"):
        list(source.read("nothing"))


def test_places_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tar(tmp_path / "0.tar", layout())
    assert TarSource(urls="~/{0..0}.tar").shards() == TarSource(urls=str(tmp_path / "*.tar")).shards()
    folder_source(tmp_path, "table.csv")
    assert len(read(FolderSource(path=str(tmp_path), captions="~/table.csv"))) == len(ROWS)
    source = TextSource(files=["~/*.csv", "~/*.tar"], exclude=["~/*.tar"])
    assert source.shards() == TextSource(files=[str(tmp_path / "table.csv")]).shards()


@pytest.mark.parametrize("encoding", ["png", "pil"])
def test_mds_pictures(encoding, tmp_path):
    for row, (key, image, _) in zip(read(mds_source(tmp_path, encoding)), ROWS, strict=True):
        got = Image.open(io.BytesIO(row.image)) if encoding == "png" else row.image
        assert row.key == key and got.tobytes() == Image.open(io.BytesIO(image)).tobytes()


def test_missing_places_are_named(tmp_path):
    missing = str(tmp_path / "missing")
    for build in (FolderSource, ParquetSource, MDSSource):
        with pytest.raises(FileNotFoundError, match="missing"):
            build(path=missing)
    with pytest.raises(FileNotFoundError, match=r"no image \(.jpg, .jpeg, .*\) in "):
        FolderSource(path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"t\.jsonl"):
        FolderSource(path=str(tmp_path), captions="t.jsonl")
    with pytest.raises(FileNotFoundError, match="no .parquet file"):
        ParquetSource(path=str(tmp_path))


# Parquet


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_parquet_oddities(tmp_path, kind):
    text = pa.array([b"good", b"\xff bad", None, b"no picture", b"again"], pa.binary())
    columns = {
        "id": ["a", "b", "c", "d", "a"],
        "image": [picture(1), picture(2), picture(3), None, picture(4)],
        "text": not_utf8(text, kind),
        "width": [8, 8, 8, None, 8],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = read(ParquetSource(path=str(tmp_path / "a.parquet"), key="id"))
    assert [(row.key, getattr(row, "reason", "")) for row in rows] == [
        ("a", ""),
        ("b", "caption_not_utf8"),
        ("c", "missing_caption"),
        ("d", "missing_image"),
        ("a", "duplicate_key"),
    ]
    assert [row.key for row in read(ParquetSource(path=str(tmp_path)))][:2] == ["a_00000000", "a_00000001"]


def not_utf8(values, kind):
    """A column of text with bytes that are none."""
    if kind == pa.string_view():
        return values.cast(pa.binary_view()).view(kind)
    return pa.Array.from_buffers(kind, len(values), values.buffers())


def test_file_names_beside_the_images_of_parquet_need_not_be_text(tmp_path):
    names = pa.array([b"a.png", b"\xff.png", None, None], pa.binary())
    names = not_utf8(names, pa.string())
    bodies = pa.array([picture(1), picture(2), None, picture(3)])
    images = pa.StructArray.from_arrays([bodies, names], ["bytes", "path"], mask=pa.array([False, False, False, True]))
    pq.write_table(pa.table({"image": images, "text": ["a", "b", "c", "d"]}), tmp_path / "a.parquet")
    rows = read(ParquetSource(path=str(tmp_path)))
    assert [getattr(row, "reason", "") for row in rows] == ["", "", "missing_image", "missing_image"]
    assert [row.image for row in rows[:2]] == [picture(1), picture(2)]


@pytest.mark.parametrize(
    ("images", "texts"),
    [
        (pa.large_binary(), pa.large_string()),
        (pa.binary_view(), pa.string_view()),
        (pa.binary(), pa.binary_view()),
        (pa.dictionary(pa.int32(), pa.binary()), pa.dictionary(pa.int32(), pa.string())),
    ],
)
@pytest.mark.parametrize("struct", [False, True])
def test_parquet_types(tmp_path, images, texts, struct):
    image, text = encoded_as(images, [picture(i) for i in (1, 2, 1)]), encoded_as(texts, ["x", "y", "x"])
    if struct:
        image = pa.StructArray.from_arrays([image], ["bytes"])
    pq.write_table(pa.table({"image": image, "text": text}), tmp_path / "a.parquet")
    rows = read(ParquetSource(path=str(tmp_path)))
    assert [(row.image, row.caption) for row in rows] == [(picture(1), "x"), (picture(2), "y"), (picture(1), "x")]


def encoded_as(kind, values):
    return pa.array(values).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values).cast(kind)


def test_empty_row_groups_of_parquet_are_passed_over(tmp_path):
    table = pa.table({"image": [picture(i) for i in range(5)], "text": [f"c{i}" for i in range(5)]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for begin, rows in ((0, 0), (0, 2), (2, 0), (2, 3), (5, 0)):
            writer.write_table(table.slice(begin, rows))
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 5
    for size, shards in ((1, 2), (9, 1)):
        source = ParquetSource(path=str(tmp_path), shard_size=size)
        assert [row.caption for row in read(source)] == table["text"].to_pylist() and len(source.shards()) == shards


def test_keys_of_parquet_count_the_rows_of_the_file(tmp_path):
    """Row groups are joined until a shard has its least number of rows, and no further."""
    table = pa.table({"image": [picture(i) for i in range(7)], "text": [f"c{i}" for i in range(7)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for size, shards in ((1, ["01", "23", "45", "6"]), (2, ["01", "23", "45", "6"]), (3, ["0123", "456"])):
        source = ParquetSource(path=str(tmp_path), shard_size=size)
        found = [[(row.key, row.caption) for row in source.read(shard)] for shard in source.shards()]
        assert found == [[(f"a_0000000{row}", f"c{row}") for row in rows] for rows in shards]


def test_parquet_errors(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": ["a.png"], "text": ["x"], "n": [1]}), path)
    with pytest.raises(ValueError, match="'image' is of type string"):
        ParquetSource(path=str(path))
    with pytest.raises(ValueError, match="^source.image: .* has no column 'picture': it has image, text, n"):
        ParquetSource(path=str(path), image="picture")
    pq.write_table(pa.Table.from_arrays([pa.array([b"x"])] * 3, ["image", "text", "text"]), path)
    with pytest.raises(ValueError, match=r"^source.caption: .*a.parquet has several columns 'text'"):
        ParquetSource(path=str(path))
    pq.write_table(pa.table({"image": [b"a"], "text": [1]}), path)
    with pytest.raises(ValueError, match="'text' is of type int64"):
        ParquetSource(path=str(path))
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ValueError, match="not a Parquet file"):
        ParquetSource(path=str(path))


def test_damaged_parquet_is_reported(tmp_path):
    pq.write_table(
        pa.table({"image": [picture(i) for i in range(200)], "text": [f"c{i}" for i in range(200)]}),
        tmp_path / "a.parquet",
        row_group_size=50,
    )
    source = ParquetSource(path=str(tmp_path))
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 2000] = b"\xff" * 2000
    (tmp_path / "a.parquet").write_bytes(raw)
    rows = read(source)
    assert rows[-1].reason == "broken_shard" and isinstance(rows[0], Sample)


# MDS


def test_mds_damage_and_loss(tmp_path):
    source = mds_source(tmp_path)
    first, second = (sorted((tmp_path / "mds").glob("*.mds"))[number] for number in (0, 1))
    first.write_bytes(first.read_bytes()[:-30])
    rows = list(source.read(source.shards()[0]))
    assert rows[-1].reason == "broken_shard" and all(isinstance(row, Sample) for row in rows[:-1])
    raw = second.read_bytes().replace("ünïcode".encode(), b"\xff\xffn\xff\xffcode")
    second.write_bytes(raw)
    assert {row.reason for row in source.read(source.shards()[1])} == {"caption_not_utf8"}
    second.unlink()
    with pytest.raises(FileNotFoundError, match=second.name):
        list(source.read(source.shards()[1]))


def test_a_caption_that_mds_shards_hold_in_part_is_none(tmp_path):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path), columns={"image": "bytes", "text": "str"}) as writer:
        for text in ("a dot", "a line and no dot"):
            writer.write({"image": picture(1), "text": text})
    file = tmp_path / "shard.00000.mds"
    file.write_bytes(file.read_bytes()[:-8])
    first, second = read(MDSSource(path=str(tmp_path), caption="text"))
    assert (first.caption, second.reason) == ("a dot", "broken_shard")


def test_mds_columns_are_checked(tmp_path):
    mds_source(tmp_path)
    path = str(tmp_path / "mds")
    with pytest.raises(ValueError, match="'extra' is of encoding 'pkl'"):
        MDSSource(path=path, caption="extra")
    with pytest.raises(ValueError, match="^source.caption: .* has no column 'text'"):
        MDSSource(path=path, caption="text")
    index = tmp_path / "mds" / "index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../shard.00000.mds"))
    with pytest.raises(ValueError, match="leaves the folder"):
        MDSSource(path=path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="not the index"):
        MDSSource(path=path)


def test_mds_damaged_compression(tmp_path):
    source = mds_source(tmp_path, compression="zstd:3")
    next(iter(sorted((tmp_path / "mds").glob("*.zstd")))).write_bytes(b"damage")
    assert [row.reason for row in source.read(source.shards()[0])] == ["broken_shard"]


@pytest.mark.parametrize("compression", ["br:5", "bz2:9", "gz:5", "snappy", "zstd:3"])
def test_mds_bombs_are_not_read_to_their_end(tmp_path, monkeypatch, compression):
    source = mds_source(tmp_path, compression=compression)
    shard = source.shards()[0]
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    samples = source.read(shard)
    whole = [next(samples)]
    assert not list((tmp_path / "scratch").iterdir())  # which a process that is killed now would leave
    whole += samples
    assert all(isinstance(row, Sample) for row in whole)
    raw = source.infos[shard]["raw_data"]
    for size, reason in ((raw["bytes"] - 1, ""), (raw["bytes"] + 1, ""), (2 * MEMORY, "more than this machine's")):
        raw["bytes"] = size
        (row,) = source.read(shard)
        assert row.reason == "broken_shard" and reason in row.detail


def test_a_file_that_no_picture_has_is_rejected(monkeypatch):
    monkeypatch.setattr("data.sources.base.MAX_FILE_BYTES", 3)
    assert assemble("k", b"123", "a dot") == Sample("k", b"123", "a dot")
    assert assemble("k", b"1234", "a dot") == Rejected("k", "too_large_file", "4 bytes")


@pytest.mark.parametrize(("name", "place"), [("mds", "mds"), ("mds, zstd", "mds"), ("folder, txt", "folder")])
def test_a_file_that_no_picture_has_is_not_read(tmp_path, monkeypatch, name, place):
    sizes = [len(image) for _, image, _ in ROWS]
    monkeypatch.setattr(f"data.sources.{place}.MAX_FILE_BYTES", 20)
    assert min(sizes) > 40 and {row.reason for row in read(SOURCES[name](tmp_path))} == {"too_large_file"}


# The disk


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), pa.ArrowMemoryError("malloc failed")])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("parquet", "data.sources.parquet.check_pages"),
        ("parquet", "pyarrow.parquet.ParquetFile"),
        ("mds", "streaming.base.format.mds.reader.MDSReader.get_sample_data"),
        ("mds, zstd", "data.sources.mds._decompressed"),
    ],
)
def test_errors_of_the_disk_are_no_damage(name, place, error, tmp_path, monkeypatch):
    """A shard that is rejected is never read again, and one that raises is tried again."""
    source = SOURCES[name](tmp_path)
    monkeypatch.setattr(place, Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error.args[-1])):
        read(source)


# What the callers write


def test_a_rejected_sample_is_one_line_of_json():
    line = rejected_line("s0", Rejected("b\udcff", "aspect", "9x1"))
    assert json.loads(line) == {"key": "b\udcff", "shard": "s0", "reason": "aspect", "detail": "9x1"}
    assert line.isascii() and "\n" not in line


@given(st.text(max_size=99), st.text(max_size=9))
@example("table", "\ud800.png")  # JSON can hold it
def test_shard_ids_are_folder_names(name, identity):
    one = shard_id(name, identity)
    assert len(one) <= 80 and set(one) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-0123456789")
    assert one == shard_id(name, identity) != shard_id(name, identity + "x")


def test_reasons_are_documented():
    assert all(reason.isidentifier() and text for reason, text in REASONS.items())
    with pytest.raises(WrongResult, match="the sample 'a' is rejected as 'because', which is none of the reasons"):
        Rejected("a", "because")


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "returns None; return a list"),
        ((name for name in "ab"), "returns a value of type generator; return a list"),
        ([0, 1], "returns the id 0; an id is the name of a folder"),
        (["a", ""], "returns the id ''; an id is the name of a folder"),
        (["a", "../b"], "returns the id '../b'; an id is the name of a folder"),
        (["a", "b", "a"], "returns the id 'a' 2 times"),
    ],
)
def test_ids_of_shards_are_different_names_of_folders(found, message):
    source = SimpleNamespace(shards=lambda: found)
    with pytest.raises(WrongResult, match=re.escape(f"SimpleNamespace.shards() {message}")):
        shards_of(source)
    assert shards_of(SimpleNamespace(shards=lambda: ("a", "b"))) == ["a", "b"]


@pytest.mark.parametrize(
    "sample, message",
    [
        (None, "None instead of a Sample or a Rejected, as sample 1"),
        (("k", b"", "text"), "a value of type tuple instead of a Sample or a Rejected"),
        (Sample(7, b"", "text"), "a Sample whose key is 7 instead of a text"),
        (Sample("k", bytearray(), "text"), "a Sample whose image is a value of type bytearray instead of bytes"),
        (Sample("k", b"", None), "a Sample whose caption is None instead of a text"),
        (Rejected("k", "broken_image", OSError("x")), "a Rejected whose detail is a value of type OSError"),
    ],
)
def test_what_a_source_yields_is_checked(sample, message):
    """All images of another type were rejected as broken; what is no sample ended a job with a traceback."""
    good = Sample("a", b"", "text")
    samples = samples_of(SimpleNamespace(read=lambda shard: iter([good, sample])), "s0")
    assert next(samples) == good
    with pytest.raises(WrongResult, match=re.escape(f"SimpleNamespace.read('s0') yields {message}")):
        next(samples)
    with pytest.raises(WrongResult, match=re.escape("SimpleNamespace.read('s0') returns None; yield samples")):
        next(samples_of(SimpleNamespace(read=lambda shard: None), "s0"))


def test_shards_whose_hashes_begin_alike_have_ids_of_their_own():
    """sha256 of both begins with c11eb5e6, so that one folder would have been taken for the other's."""
    ids = shard_ids([("set", (69235,)), ("set", (95303,)), ("other", (95303,)), ("set", (1,))])
    assert len(set(ids)) == 4 and [len(one.partition("-")[2]) for one in ids] == [16, 16, 8, 8]
    assert all(one.startswith("set-c11eb5e6") for one in ids[:2]) and ids[3] == shard_id("set", 1)
