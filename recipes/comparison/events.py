"""What a run has logged, read from its TensorBoard files without TensorBoard's server."""

from __future__ import annotations

import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from tensorboard.compat.proto.event_pb2 import Event

from data.system.disk_errors import about
from data.system.log import log

FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+)\.(\d+)\.(\d+)")  # time, host, process, number in the process
SAMPLES = "time/sample"  # the figure that counts samples, which both engines log with every batch
COPIES = "hparams/"  # figures that Composer writes a second time, as results of the hyperparameters


@dataclass(frozen=True)
class Curve:
    """A figure over a run; where a run was resumed, what was logged after the checkpoint before it stopped is left out.

    Attributes:
        batches: (N,) float64, increasing.
        hours: (N,) float64, since the run's first figure, without the time between a stop and the resume.
        values: (N,) float64; some may not be finite.
    """

    batches: np.ndarray
    hours: np.ndarray
    values: np.ndarray


def read_curves(folder: Path) -> dict[str, Curve]:
    """The figures by name in the TensorBoard files below a folder; empty if there are none.

    A start that repeats batches, or that begins the run anew, takes back all figures that earlier starts logged after
    the batch at which it begins, also those that it has not come to itself.
    """
    # (seconds, batch, value), one after the other: as tuples, those of a run of weeks would take 10 GB.
    logged: dict[str, array] = defaultdict(lambda: array("d"))
    begun = end = 0.0  # seconds of training before the present start of the run, and up to the last figure
    last: tuple[str, str, int] | None = None
    counted = False  # whether the present start has logged a batch
    for file in sorted(filter(FILE.search, map(str, folder.rglob("events.out.tfevents.*"))), key=_order):
        _, host, process, number = FILE.search(file).groups()
        if last is None or last[:2] != (host, process) or int(number) <= last[2]:
            begun, first, counted = end, None, False
        last = host, process, int(number)
        for event in _events(Path(file)):
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value" and not value.tag.startswith(COPIES):
                    first = event.wall_time if first is None else first
                    seconds = begun + max(0.0, event.wall_time - first)
                    end = max(end, seconds)
                    logged[value.tag].extend((seconds, event.step, value.simple_value))
                    if value.tag == SAMPLES and not counted:
                        counted = True
                        _take_back(logged.values(), event.step)
    names = sorted(name for name, rows in logged.items() if rows)
    return {name: _curve(np.frombuffer(logged.pop(name)).reshape(-1, 3)) for name in names}


def _take_back(logged: Iterable[array], batch: int) -> None:
    """Remove what was logged last and is of later batches. Validation after a batch is logged with the number that the
    next batch is logged with, so what is of the same number stays."""
    for rows in logged:
        while rows and rows[-2] > batch:
            del rows[-3:]


def _order(file: str) -> tuple[int, int]:
    time, _, _, number = FILE.search(file).groups()
    return int(time), int(number)


def _events(file: Path) -> Iterator[Event]:
    """The events of a file. Its end may be missing, if the run was killed or is still writing. Events whose bytes have
    changed since they were written are left out, and a line says so.

    A record is its length (8 bytes), a checksum of that (4), the event, and a checksum of the event (4).
    """
    damaged = 0
    with about(file), open(file, "rb") as stream:
        while len(head := stream.read(12)) == 12:
            length, checksum = struct.unpack("<QI", head)
            if checksum != _checksum(head[:8]):  # where the next record begins is not known
                at = stream.tell() - 12
                log.warning(f"{file}: damaged at byte {at:,}; the figures behind it are left out: copy the file again")
                break
            if length > file.stat().st_size:
                break
            record = stream.read(length + 4)
            if len(record) < length + 4:
                break
            event = _event(record)
            if event is None:
                damaged += 1
            else:
                yield event
    if damaged:
        log.warning(f"{file}: {damaged} damaged records, whose figures are left out; copy the file again")


def _event(record: bytes) -> Event | None:
    """The event in a record; None: the record is damaged."""
    if record[-4:] != struct.pack("<I", _checksum(record[:-4])):
        return None
    try:
        return Event.FromString(record[:-4])
    except DecodeError:
        return None


def _checksum(data: bytes) -> int:
    """The CRC-32C of bytes as TensorFlow's records have it: rotated, and with a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _curve(rows: np.ndarray) -> Curve:
    """A curve of (seconds, batch, value) rows (N, 3), in the order in which they were logged.

    That is not the order of their times: the clock of a machine may go back, or be behind that of the one before.
    """
    seconds, batches, values = rows.T
    later = np.append(np.minimum.accumulate(batches[::-1])[::-1][1:], np.inf)  # the first batch that comes after
    kept = batches < later
    return Curve(batches[kept], seconds[kept] / 3600, values[kept])
