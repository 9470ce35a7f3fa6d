"""Sources that nobody should trust: whatever their bytes are, they give samples and rejected ones, or one line."""

import io
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources.base import Rejected, Sample
from data.sources.folder import FolderSource
from data.sources.parquet import ParquetSource
from data.sources.parquet_footer import END
from data.sources.tars import TarSource
from data.sources.thrift import structure
from tests.fuzzing import changed_bytes, few, reads_or_refuses

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
    no_number = b"\x15\x00\x1c\x00\x15\x02\x00"  # a structure as the second field, the size
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was read"))
    for name, data, text in (
        ("page", with_number(whole, page + 3, 1_000_000), "column image.bytes: a page .* 1,000,000 uncompressed"),
        ("dictionary", with_number(whole, entries, 8000), "column text: a dictionary at byte .* claims 8,000 entries"),
        ("no number", whole[:page] + no_number + whole[page + len(no_number) :], "claims 1 bytes, -1 uncompressed"),
        ("nothing", whole[:page] + b"\xff" * 20 + whole[page + 20 :], "column image.bytes: a value of type 15"),
    ):
        file.write_bytes(data)
        found = list(ParquetSource(path=str(file)).read(shard))
        assert [type(sample) for sample in found] == [Rejected], name
        assert found[0].reason == "broken_shard" and re.search(text, found[0].detail), found


def test_row_groups_of_all_workers_must_fit_into_memory(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch.utils.data

    from data.sources import parquet

    table = pa.table({"image": [b"x" * 900] * 3, "text": ["y" * 900] * 3, "unread": [[1] * 900] * 3})
    pq.write_table(table, tmp_path / "t.parquet", use_dictionary=False)
    monkeypatch.setattr(parquet, "MEMORY", 10_000)
    source = parquet.ParquetSource(path=str(tmp_path))
    (shard,) = source.shards()
    assert len(list(source.read(shard))) == 3
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(ValueError, match="in each of 2 workers, more than the 10,000 of memory; give fewer `workers`"):
        list(source.read(shard))
    monkeypatch.setattr(parquet, "MEMORY", 7000)  # more than each of the columns
    with pytest.raises(ValueError, match="t.parquet: row group 0 claims .* smaller row groups"):
        parquet.ParquetSource(path=str(tmp_path))


@pytest.fixture(scope="module")
def parquet_bytes() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    table = pa.table({"image": [b"png", b""] * 3, "text": ["a", "b"] * 3, "n": list(range(6))})
    pq.write_table(table, out, compression="zstd", row_group_size=3)
    return out.getvalue()


def read_all(source) -> list:
    return [sample for shard in source.shards() for sample in source.read(shard)]


@few
@given(st.data())
def test_parquet_files(parquet_bytes, tmp_path, data):
    (tmp_path / "t.parquet").write_bytes(data.draw(changed_bytes(parquet_bytes)))
    found = reads_or_refuses(lambda: read_all(ParquetSource(path=str(tmp_path / "t.parquet"))))
    assert all(isinstance(sample, Sample | Rejected) for sample in found or [])


@few
@given(st.binary(max_size=60))
def test_any_bytes_are_a_structure_of_thrift_or_an_error(data):
    try:
        fields, end = structure(data)
    except (ValueError, IndexError):
        return
    assert 0 < end <= len(data) and all(isinstance(number, int) for number in fields)


def test_metadata_of_a_column_that_pyarrow_cannot_bear_ends_no_process(parquet_bytes, tmp_path):
    """A column that must have values, but sizes of one that need not: pyarrow's `RowGroupMetaData.column` aborts."""
    end = len(parquet_bytes) - END
    begin = end - int.from_bytes(parquet_bytes[end : end + 4], "little")
    optional, required = b"\x15\x0c\x25\x02", b"\x15\x0c\x25\x00"  # two fields of a column in the schema
    place = parquet_bytes.index(optional, begin)
    (tmp_path / "t.parquet").write_bytes(parquet_bytes[:place] + required + parquet_bytes[place + 4 :])
    found = reads_or_refuses(lambda: read_all(ParquetSource(path=str(tmp_path / "t.parquet"))))
    assert found and all(isinstance(sample, Sample | Rejected) for sample in found)


def test_a_column_whose_name_is_no_text_is_refused_in_one_line(parquet_bytes, tmp_path):
    (tmp_path / "t.parquet").write_bytes(parquet_bytes.replace(b"image", b"\xe9mage"))
    with pytest.raises(ValueError, match="t.parquet is not a Parquet file: 'utf-8' codec can't decode byte 0xe9"):
        ParquetSource(path=str(tmp_path / "t.parquet"))


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


# --- folders with captions ---------------------------------------------------------------------------------------

ROWS = b'{"file_name": "a.png", "text": "a dot", "n": [1]}\n{"file_name": "b.png", "text": null}\n'
TABLE = b'file_name,text,n\na.png,"a ""red"" dot",1\nb.png,,\n'


@few
@given(st.data())
def test_captions_of_folders(tmp_path, data):
    for name, good in {"a.txt": b"a dot", "captions.jsonl": ROWS, "captions.csv": TABLE}.items():
        (tmp_path / "a.png").write_bytes(b"png")
        (tmp_path / name).write_bytes(data.draw(changed_bytes(good) | st.binary(max_size=20)))
        options = {"path": str(tmp_path), "captions": "txt" if name == "a.txt" else name}
        found = reads_or_refuses(lambda options=options: read_all(FolderSource(**options)))
        assert all(isinstance(sample, Sample | Rejected) for sample in found or [])


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a\\nb": 1}'], ids=["deep", "lines"])
def test_rows_of_captions_that_were_made_to_hurt(line, tmp_path):
    (tmp_path / "a.png").write_bytes(b"png")
    (tmp_path / "captions.jsonl").write_text(line)
    assert reads_or_refuses(lambda: FolderSource(path=str(tmp_path), captions="captions.jsonl")) is None


# --- pictures ----------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_program_is_started_for_a_picture(tmp_path, monkeypatch):
    """Pillow gives EPS files to Ghostscript, where that is installed."""
    from PIL import EpsImagePlugin, Image

    from data.sources.filters import Filter
    from recipes.comparison.pictures import _grids
    from recipes.models.autoregressive.pipeline import TokenPipeline

    started = []
    blank = Image.new("RGB", (9, 9)).im
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1) or blank)
    (tmp_path / "ba1.png").write_bytes(EPS)
    pipeline = SimpleNamespace(network=SimpleNamespace(layout=SimpleNamespace(side=4)), resolution=8)
    for read in (lambda: TokenPipeline._given(pipeline, tmp_path / "ba1.png", 1), lambda: _grids(tmp_path, 3, 1)):
        with pytest.raises(ValueError, match="not readable as a picture"):
            read()
    assert Filter().decode(Sample("a", EPS, "a dot")).reason == "broken_image" and not started
    with Image.open(tmp_path / "ba1.png") as picture:  # and this is such a file
        picture.load()
    assert started
