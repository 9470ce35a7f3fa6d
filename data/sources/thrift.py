"""Structures of Thrift's compact protocol, as Parquet files have them in their metadata and at their pages."""

from __future__ import annotations

from typing import Any

DEEPEST = 16  # structures and lists within each other


def structure(data: bytes, at: int = 0, depth: int = DEEPEST) -> tuple[dict[int, Any], int]:
    """The fields of a structure by number, and where it ends. Numbers of floating point keep no value.

    Raises:
        IndexError: it goes on beyond the data.
        ValueError: it is not a structure.
    """
    if not depth:
        raise ValueError("structures within structures")
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step = data[at] & 15, data[at] >> 4
        number, at = (number + step, at + 1) if step else _integer(data, at + 1)
        if kind in (1, 2):  # a boolean, whose value is its type
            fields[number] = kind == 1
        else:
            fields[number], at = _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2 | 3:  # a byte; in lists, booleans are bytes too
            return data[at], at + 1
        case 4 | 5 | 6:
            return _integer(data, at)
        case 7:
            return None, at + 8
        case 8:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError("a text goes on beyond the data")
            return data[at : at + length], at + length
        case 9 | 10:
            return _list(data, at, depth - 1)
        case 12:
            return structure(data, at, depth - 1)
    raise ValueError(f"a value of type {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    if not depth:
        raise ValueError("lists within lists")
    kind, count = data[at] & 15, data[at] >> 4
    count, at = _varint(data, at + 1) if count == 15 else (count, at + 1)
    values = []
    for _ in range(count):  # each takes a byte at least, so that the data ends before a count that is too large
        value, at = _value(data, at, kind, depth)
        values.append(value)
    return values, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
