"""Checkpoints as `torch.save` writes them, without checksums of tensors.

PyTorch writes a CRC-32 of each record, and compares none when it reads. They take three quarters of the time in which a
checkpoint is handed to the system, while all devices wait. What is no tensor keeps its checksum, with which
`load_plain` compares it: a changed bit may lie in a name.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options

# Of the zip format: a record's entry in the directory at the end of the file, and the header before its bytes.
ENTRY, ENTRY_SIZE, CHECKSUM_AT = b"PK\x01\x02", 46, 16
HEADER_SIZE, LENGTHS_AT = 30, 26


def save_full(values: Any, file: Path) -> None:
    """Write a file that `torch.load` and `load_plain` read.

    Args:
        values: what `torch.save` takes.
        file: to write.

    Raises:
        OSError: the file cannot be written.
    """
    with file.open("w+b") as opened, checksums(False):  # by a path, PyTorch would not say why it cannot write
        torch.save(values, opened)
        _add_checksum_of_pickle(opened)


@contextmanager
def checksums(written: bool) -> Iterator[None]:
    """A context in which `torch.save` writes checksums, or zeros in their place."""
    before = get_crc32_options()
    set_crc32_options(written)
    try:
        yield
    finally:
        set_crc32_options(before)


def _add_checksum_of_pickle(file: BinaryIO) -> None:
    """Put the CRC-32 of the record `data.pkl` into its entry in the directory."""
    with zipfile.ZipFile(file) as records:
        entry, all_records = records.start_dir, records.infolist()
    for record in all_records:
        if record.filename.endswith("/data.pkl"):
            break
        entry += ENTRY_SIZE + len(record.filename.encode()) + len(record.extra) + len(record.comment)
    file.seek(record.header_offset + LENGTHS_AT)
    name, extra = struct.unpack("<HH", file.read(4))
    file.seek(record.header_offset + HEADER_SIZE + name + extra)
    checksum = zlib.crc32(file.read(record.file_size))
    file.seek(entry)
    assert file.read(len(ENTRY)) == ENTRY, f"no entry of {record.filename} at byte {entry}"
    file.seek(entry + CHECKSUM_AT)
    file.write(struct.pack("<I", checksum))
