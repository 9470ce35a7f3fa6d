import numpy as np
import pytest
from streaming import MDSWriter

from precompute.output.mds_files import MDSFiles

COLUMNS = {
    "key": "str",
    "width": "int",
    "raw": "bytes",
    "tokens": "ndarray:uint16:2,3",
    "text": "ndarray:float16:3,5",
    "any": "ndarray:int32",
}


@pytest.mark.parametrize("compression", [None, "zstd:1"])
def test_files_are_those_of_streaming(tmp_path, compression):
    for kind in (MDSWriter, MDSFiles):
        out, hashes = str(tmp_path / kind.__name__), ["sha1", "xxh3_64"]
        writer = kind(out=out, columns=COLUMNS, compression=compression, hashes=hashes, size_limit=600)
        for number in range(9):
            row = {"key": f"k\u00e9y {number}", "width": number, "raw": bytes(number)}
            row["tokens"] = np.arange(number, number + 6, dtype=np.uint16).reshape(3, 2).T  # not contiguous
            row["text"] = np.full((3, 5), number, np.float16)
            row["any"] = np.arange(number + 1, dtype=np.int32)
            writer.write(row)
        for wrong in (row["tokens"].T, row["tokens"].astype(np.int16)):
            with pytest.raises(ValueError):
                writer.write(row | {"tokens": wrong})
        writer.finish()
    theirs, ours = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("MDSWriter", "MDSFiles"))
    assert theirs == ours and len(ours) > 3
