"""Chosen columns of MDS shards, against streaming's own reader."""

import os
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter, StreamingDataset

from data.encoded.column_reader import ColumnReader, column_readers


def test_columns_are_those_of_streamings_reader(tmp_path):
    """Columns of fixed and of variable size in every order, of which some are read."""
    rng = np.random.default_rng(0)
    columns = {"a": "str", "b": "ndarray:float32:3", "c": "bytes", "d": "ndarray:uint16:2,2", "e": "int", "f": "str"}
    rows = [
        {
            "a": "é" * int(rng.integers(9)),
            "b": rng.random(3, np.float32),
            "c": bytes(int(rng.integers(9))),
            "d": rng.integers(0, 99, (2, 2), np.uint16),
            "e": number,
            "f": "x" * int(rng.integers(9)),
        }
        for number in range(20)
    ]
    with MDSWriter(out=str(tmp_path / "set"), columns=columns, size_limit=300) as writer:
        for row in rows:
            writer.write(row)
    shards = StreamingDataset(local=str(tmp_path / "set"), batch_size=1).shards
    readers = column_readers(shards, {"second": "d", "first": "b"}, ("f", "a"))
    samples = [reader[number] for reader in readers for number in range(reader.samples)]
    assert len(readers) > 1 and len(samples) == 20
    for row, sample in zip(rows, samples, strict=True):
        assert sample.texts == [row["f"], row["a"]] and list(sample.arrays) == ["second", "first"]
        assert sample.arrays["first"].tobytes() == row["b"].tobytes()
        assert sample.arrays["second"].tobytes() == row["d"].tobytes()
    assert readers[0].arrays["second"].shape == (2, 2)
    data = readers[-1].get_sample_data(0)
    for damaged in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match=f"{len(damaged)} of {len(data)} bytes"):
            readers[-1].decode_sample(damaged)
    os.truncate(readers[1].path, 8)
    column_readers(shards, {"first": "b"}, ("a",), rank=0, ranks=2)  # each process looks at its share of the files
    with pytest.raises(ValueError, match="shard.00001.mds: .* has room for 8;"):
        column_readers(shards, {"first": "b"}, ("a",), rank=1, ranks=2)


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
        ({"key": "int"}, "column `key` is int, but texts are read from columns of type str"),
    ],
)
def test_refuses_columns_that_it_cannot_read(tmp_path, columns, message):
    dataset = rewrite(tmp_path / "set", **columns)
    with pytest.raises(ValueError, match=message):
        ColumnReader(dataset.shards[0], {"mean": "mean_32", "std": "std_32", "text": "text"})


def test_refuses_streams_of_different_shapes(tmp_path):
    shards = rewrite(tmp_path / "a").shards + rewrite(tmp_path / "b", text="ndarray:float16:1,2").shards
    with pytest.raises(ValueError, match=r"b/shard.00000.mds: column `text` holds .*\(1, 2\).* other shards .*\(2,\)"):
        column_readers(shards, {"mean": "mean_32", "std": "std_32", "text": "text"})
