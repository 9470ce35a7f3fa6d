"""How long training waits between two epochs of a large set for the order of the second one.

python benchmarks/epochs.py
python benchmarks/epochs.py --samples 1000000 10000000 --batches 200

The sets are packed texts of two tokens, all files of which are links to the same one of 385 rows, as many as a file of
latents has at 256. For each size the order is made when the epoch begins, as streaming does it, and ahead, while the
end of the epoch before is read. "resumed" is the wait for the first batch after a position has been loaded, for which
nothing is made ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np
from streaming import MDSWriter

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from data.encoded import dataset
from data.encoded.mds_index import INDEX, read_index
from data.encoded.sets import local_set
from data.encoded.text_manifest import TextManifest
from data.loading import Batch, Loading, Placement, end_idle_workers
from data.texts import texts
from data.tokenizers.vocabulary_files import VOCABULARY, VocabularyFile

ROWS = 385  # per file: 64 MiB of latents and text embeddings at 256
POSITIONS, TOKENS = 1, 512
BATCH = 32


def write_set(folder: Path, samples: int) -> int:
    """Write a set of at least this many samples; returns their number."""
    columns = {"key": "str", "tokens": f"ndarray:uint16:{POSITIONS + 1}"}
    with MDSWriter(out=str(folder / "file"), columns=columns) as out:
        for number in range(ROWS):
            out.write({"key": str(number), "tokens": np.full(POSITIONS + 1, number, np.uint16)})
    (entry,) = read_index(folder / "file")
    names = [f"{number:07}.mds" for number in range(-(-samples // ROWS))]
    for name in names:
        os.symlink(folder / "file" / entry["raw_data"]["basename"], folder / name)
    shards = [{**entry, "raw_data": {**entry["raw_data"], "basename": name}} for name in names]
    (folder / INDEX).write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    (folder / VOCABULARY).write_text("{}", encoding="utf-8")
    TextManifest(
        positions=POSITIONS,
        vocabulary=TOKENS,
        vocabulary_hash=VocabularyFile.read(folder / VOCABULARY).sha256,
        samples=ROWS * len(names),
        texts=len(names),
        left_out=0,
        rejected={},
        shards=1,
        bytes=entry["raw_data"]["bytes"] * len(names),
        request={},
    ).write(folder)
    return ROWS * len(names)


def open_set(folder: Path, workers: int) -> Loading:
    requirements = {"positions": POSITIONS, "vocabulary": TOKENS}
    streams = {"train": local_set(path=str(folder))}
    return texts(Placement(batch=BATCH, training=True), requirements, streams=streams, workers=workers)


def ends_of_epochs(loading: Loading, batches: int) -> Iterator[tuple[float, Iterator[Batch]]]:
    """Begins each epoch near its end; yields how long its first batch took, and its others."""
    epoch = 0
    while True:
        begin = {"epoch": epoch, "sample_in_epoch": loading.samples - batches * BATCH}
        loading.loader.load_state_dict(loading.loader.state_dict() | begin)
        started = time.perf_counter()
        iterator = iter(loading.loader)
        next(iterator)
        yield time.perf_counter() - started, iterator
        epoch += 2


def waits(folder: Path, workers: int, batches: int, rounds: int) -> dict[str, float]:
    """Median seconds until the first batch: of an epoch that is resumed, and of the one after it."""
    loading = open_set(folder, workers)
    resumed, after = [], []
    try:
        for first, rest in ends_of_epochs(loading, batches):
            resumed.append(first)
            pause = 3 * first / batches  # the devices work for longer than an order takes
            for _ in rest:
                time.sleep(pause)
            started = time.perf_counter()
            iterator = iter(loading.loader)
            next(iterator)
            after.append(time.perf_counter() - started)
            del iterator
            if len(after) == rounds:
                break
    finally:
        end_idle_workers(loading.loader)
    return {"resumed s": round(statistics.median(resumed), 2), "next epoch s": round(statistics.median(after), 2)}


def memory_and_time(folder: Path) -> dict[str, Any]:
    """What a process that makes an order needs: seconds, and bytes beside those that it has at its start."""
    loading = open_set(folder, 1)
    data = loading.loader.dataset
    data._resume(data._parallel_rank_world, 0)
    kilobytes, seconds = [], []
    for make in (lambda: None, lambda: data._make_order(data._parallel_rank_world, 1, 0)):
        started = time.perf_counter()
        if not (process := os.fork()):
            make()
            os._exit(0)
        _, status, used = os.wait4(process, 0)
        assert status == 0
        kilobytes.append(used.ru_maxrss)
        seconds.append(time.perf_counter() - started)
    held = 1024 * (kilobytes[1] - kilobytes[0]) / loading.samples
    return {"order s": round(seconds[1], 2), "bytes per sample": round(held)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--batches", type=positive, default=200, help="batches that are read of an epoch's end")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args()
    if min(options.samples) < (read := options.batches * BATCH):
        parser.error(f"--samples: {min(options.samples)}; give {read} or more, which --batches {options.batches} reads")
    rows = []
    for samples in options.samples:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            samples = write_set(folder, samples)
            of_order = memory_and_time(folder)
            for way, dataset.AHEAD_FROM in (("when the epoch begins", samples + 1), ("ahead", 0)):
                waited = waits(folder, options.workers, options.batches, options.rounds)
                rows.append({"samples": samples, "order made": way, **waited, **of_order})
    notes = (
        f"Medians of {options.rounds} times, with {options.workers} workers. `next epoch s` is the wait for the first "
        "batch of an epoch after the last one of the epoch before. `order s` is the time of a process that makes an "
        "order, and `bytes per sample` the memory that it needs for that."
    )
    write_results("epochs", f"{max(options.samples):.0e}".replace("e+0", "e").replace("e+", "e"), rows, notes)


if __name__ == "__main__":
    main()
