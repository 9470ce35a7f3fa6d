"""Structures of Thrift's compact protocol, byte by byte. Files of pyarrow are in test_parquet_footer.py."""

import io

import pytest

from data.sources.parquet_pages import COMPRESSED, UNCOMPRESSED, WINDOWS, _header
from data.sources.thrift import structure

STRUCTURE, LIST, TEXT, INTEGER, DOUBLE = 12, 9, 8, 5, 7


def test_fields_are_those_that_their_bytes_say():
    data = [0x11, 0x12]  # true and false are types
    data += [0x10 | INTEGER, 5, 0x10 | DOUBLE, *range(1, 9)]  # -3, and eight bytes without a value
    data += [INTEGER, 2 * 300 & 127 | 128, 2 * 300 >> 7, 14]  # field 300, whose number is written out, is 7
    data += [0x10 | TEXT, 2, *b"ab", 0x10 | LIST, 0xF0 | INTEGER, 16, *range(0, 32, 2), 0]
    found, end = structure(bytes([9, *data, 9]), at=1)
    assert found == {1: True, 2: False, 3: -3, 4: None, 300: 7, 301: b"ab", 302: list(range(16))}
    assert end == 1 + len(data)


@pytest.mark.parametrize("length", [9, WINDOWS[0] - 20, WINDOWS[0], 3 * WINDOWS[0]])
def test_headers_of_pages_with_long_statistics(length):
    """Which some writers do not shorten."""
    size = [length & 127 | 128, length >> 7 & 127 | 128, length >> 14]
    statistics = bytes([0x10 | STRUCTURE, 0x10 | TEXT, *size]) + b"x" * length + b"\0"
    header = bytes([0x20 | INTEGER, 2 * 10, 0x10 | INTEGER, 2 * 8, 0x20 | STRUCTURE]) + statistics + bytes([0, 0])
    found, end = _header(io.BytesIO(b"PAR1" + header + b"the page"), 4)
    assert (found[UNCOMPRESSED], found[COMPRESSED], end) == (10, 8, len(header))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([0x10 | STRUCTURE] * 9999, ValueError, "structures within structures"),
        ([0x10 | LIST] * 9999, ValueError, "lists within lists"),
        ([0x10 | INTEGER] + [255] * 9999, ValueError, "a number of more than 64 bits"),
        ([0x10 | TEXT, 3, *b"ab"], IndexError, "a text goes on beyond the data"),
        ([0x10 | LIST, 0xF0 | INTEGER, 127, 0], IndexError, "index out of range"),
        ([0x1D, 0], ValueError, "a value of type 13"),
        ([0x11], IndexError, "index out of range"),
    ],
)
def test_damaged_data_is_an_error_that_is_caught(data, error, message):
    """And no RecursionError, or work without an end."""
    with pytest.raises(error, match=message):
        structure(bytes(data))
