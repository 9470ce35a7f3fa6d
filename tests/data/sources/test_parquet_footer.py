"""The metadata of Parquet files, compared with what pyarrow reads of it."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.parquet_footer import END, row_groups

TABLE = pa.table(
    {
        "image": [{"bytes": b"x" * (n % 7), "path": None} for n in range(500)],
        "text": [f"caption {n % 9}" for n in range(500)],
        "n": range(500),
        "text_n": range(500),
        "score": [n / 7 if n % 5 else None for n in range(500)],
        "tags": [["a", "b"][: n % 3] for n in range(500)],
        "yes": [n % 2 == 0 for n in range(500)],
    }
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 16, "compression": "zstd", "data_page_version": "2.0", "write_page_index": True},
        {"use_dictionary": False, "compression": "none", "version": "1.0", "write_statistics": False},
        {"use_dictionary": False, "column_encoding": {"n": "DELTA_BINARY_PACKED"}, "store_schema": False},
        {"sorting_columns": [pq.SortingColumn(2)], "compression": {"text": "gzip"}},
    ],
    ids=str,
)
def test_row_groups_are_those_of_pyarrow(options, tmp_path):
    pq.write_table(TABLE, tmp_path / "t.parquet", **options)
    metadata = pq.ParquetFile(tmp_path / "t.parquet").metadata
    found = row_groups(tmp_path / "t.parquet")
    assert [group.rows for group in found] == [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    for number, group in enumerate(found):
        assert len(group.chunks) == metadata.num_columns
        for column, chunk in enumerate(group.chunks):
            expected = metadata.row_group(number).column(column)
            assert chunk.path == expected.path_in_schema
            assert chunk.total_uncompressed_size == expected.total_uncompressed_size
            assert chunk.total_compressed_size == expected.total_compressed_size
            assert chunk.data_page_offset == expected.data_page_offset
            assert chunk.dictionary_page_offset == (expected.dictionary_page_offset or 0)
    assert [chunk.path for chunk in found[0].of(["image", "n"])] == ["image.bytes", "image.path", "n"]
    assert [chunk.path for chunk in found[0].of(["text"])] == ["text"]


def test_a_table_without_rows(tmp_path):
    pq.write_table(TABLE.slice(0, 0), tmp_path / "t.parquet")
    assert sum(group.rows for group in row_groups(tmp_path / "t.parquet")) == 0


def test_damaged_metadata_is_one_line(tmp_path):
    pq.write_table(TABLE, tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    for length, text in ((0, "is damaged"), (40, "is damaged"), (len(whole), "claims .* of the file's")):
        (tmp_path / "t.parquet").write_bytes(whole[:-END] + length.to_bytes(4, "little") + b"PAR1")
        with pytest.raises(ValueError, match=f"t.parquet: the metadata .*{text}"):
            row_groups(tmp_path / "t.parquet")
