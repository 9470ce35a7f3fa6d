"""Speed of what the main process of an encode job does besides the encoders: it receives batches and writes results.

Encoders that compute nothing give random values (Stable Diffusion 2 at 256: mean and std 4x32x32, text 77x1024,
float16, 174 kB per image), which are written with hashes and brought to the disk. Batches of pixels are received from
a worker process, which only allocates them, and copied, as into pinned memory. Written shards are also uploaded, to a
server on this machine that keeps nothing: by a process of its own, as the job does it, and by a thread of the main
process. A rate is the number of images per CPU second of all threads of the main process.

    python benchmarks/encode_writing.py                # a minute, 0.4 GB in the temporary folder
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from streaming import MDSWriter
from torch.utils.data import IterableDataset

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.discarding_store import discarding_store
from data.sources.base import InputShard, Position
from data.system.files import to_disk
from data.system.helper_process import HelperProcess
from precompute.encoding.batch import DecodedBatch, ImageFacts, ShardEnd
from precompute.encoding.columns import LatentColumns
from precompute.encoding.decode import batches
from precompute.encoding.encodings import Encodings
from precompute.encoding.pipeline import EncodePipeline
from precompute.encoding.progress import EncodeProgress
from precompute.encoding.writer import ShardWriter, Storage
from precompute.output.mds_files import MDSFiles
from precompute.output.upload import Uploads
from precompute.output.upload_process import upload
from recipes.encoders.base import Stored

RESOLUTION, LATENT, TEXT = 256, (4, 32, 32), (77, 1024)
BATCHES, BATCH = 32, 64
SHARD = InputShard("train", "a")


class Decoded(IterableDataset):
    """Batches of one input shard."""

    shards = [SHARD]

    def __iter__(self) -> Iterator[DecodedBatch]:
        boxes = {RESOLUTION: [(0, 64, 512, 576)]}
        for batch in range(BATCHES):
            numbers = range(BATCH * batch, BATCH * (batch + 1))
            images = [ImageFacts(Position(SHARD, n), f"{n:09d}", f"caption {n}", 512, 640, boxes) for n in numbers]
            pixels = torch.empty((BATCH, 1, RESOLUTION, RESOLUTION, 3), dtype=torch.uint8)
            ends = [ShardEnd(SHARD, BATCH * BATCHES, 1)] if batch == BATCHES - 1 else []
            yield DecodedBatch({RESOLUTION: pixels}, torch.zeros(BATCH, TEXT[0]).long(), images, ends=ends)


def encodings(seed: int) -> Encodings:
    """Random values of a batch."""
    draw, good = torch.Generator().manual_seed(seed), torch.ones(BATCH, dtype=torch.bool)
    arrays = {name: torch.randn(BATCH, *LATENT, generator=draw).half() for name in ("mean", "std")}
    stored = Stored(arrays, good, torch.zeros((BATCH, 3, LATENT[0]), dtype=torch.float64))
    return Encodings({RESOLUTION: stored}, torch.randn(BATCH, *TEXT, generator=draw).half(), good, good)


def receive() -> None:
    """Copies batches that worker processes send."""
    pinned = torch.empty((BATCH, 1, RESOLUTION, RESOLUTION, 3), dtype=torch.uint8)
    for batch in batches(Decoded(), workers=1, prefetch=2, pin=False):
        pinned.copy_(batch.pixels[RESOLUTION])


class UploadThread(HelperProcess):
    """In place of the process that uploads: tasks are done by the thread that waits for it."""

    def start(self) -> None:
        """Starts nothing."""

    def do(self, task: dict[str, Any]) -> None:
        upload(task)


def write(
    kind: type[MDSWriter], values: list[Encodings], uploader: type[HelperProcess] | None = None
) -> None:
    """Runs the encode job's pipeline on batches that are made in this process.

    Args:
        kind: of the writer.
        values: that are written.
        uploader: does the uploads; None: there are none.
    """
    columns, storage = LatentColumns({RESOLUTION: LATENT}, TEXT), Storage(hashes=("xxh3_64",))
    with tempfile.TemporaryDirectory(prefix="encode-") as folder:
        out, turns = Path(folder, "a"), itertools.cycle(values)

        def publish(shard: InputShard) -> None:
            to_disk(out)
            if uploader is not None:
                names = sorted(file.name for file in out.iterdir())
                where = {"set": folder, "address": "s3://bucket/set", "folder": str(out), "place": "shards/a"}
                uploads.add(where | {"names": names})

        pipeline = EncodePipeline(
            SimpleNamespace(kind="latents", dtype="float16"),
            None,
            lambda shard: ShardWriter(out, shard.shard, columns, storage, {}),
            publish,
            EncodeProgress(1, quiet=True),
        )
        encoding = patch("precompute.encoding.pipeline.encode", lambda *inputs: next(turns))
        process = patch("precompute.output.upload.HelperProcess", uploader or HelperProcess)
        files = patch("precompute.output.shard_folder.MDSFiles", kind)
        with encoding, process, files, Uploads(uploader is not None) as uploads:
            pipeline.run(Decoded())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=7)
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    values = [encodings(seed) for seed in range(6)]  # they come in turns, too many for the processor's cache
    parts = {
        "receiving": receive,
        "writing": lambda: write(MDSFiles, values),
        "writing by streaming's MDSWriter": lambda: write(MDSWriter, values),
        "writing, uploads by a process": lambda: write(MDSFiles, values, HelperProcess),
        "writing, uploads by a thread": lambda: write(MDSFiles, values, UploadThread),
    }
    rates: dict[str, list[float]] = {name: [] for name in parts}
    with discarding_store() as variables, patch.dict(os.environ, variables):
        for _ in range(rounds):
            for name, part in parts.items():
                started = time.process_time()
                part()
                rates[name].append(BATCH * BATCHES / (time.process_time() - started))
    rows = [
        {"part": name, "images/s per core": round(median(found)), "range": f"{min(found):,.0f} to {max(found):,.0f}"}
        for name, found in rates.items()
    ]
    both = 1 / sum(1 / row["images/s per core"] for row in rows[:2])
    notes = (
        f"{BATCHES} batches of {BATCH} images; medians of {rounds} rounds, the parts taking turns. "
        f"Load of the machine before: {load:.1f}. One core does both for {both:,.0f} images/s; the goal is over 1,650."
    )
    write_results("encode_writing", "sd2", rows, notes)


if __name__ == "__main__":
    main()
