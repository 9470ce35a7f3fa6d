"""Reading speed of precomputed latents: this project's loader, streaming's own decoding, webdataset and .npy files.

The same samples (Stable Diffusion 2 at 256: mean and std 4x32x32, text 77x1024, float16, 174 kB) are written in each
format. Each reader reads them once, which fills the page cache and compares the results, and is then timed in turns.

    python benchmarks/loader.py                        # about two minutes, 0.8 GB in the temporary folder
    python benchmarks/loader.py --samples 6000 --shard-size 16mb

- A rate is the number of samples per CPU second of all threads of the training process and of the worker ("per core"),
  or per second of wall time. Both are medians over the rounds. The first depends less on what else is running, though
  programs that share caches and memory change it too: measure on a machine that does nothing else.
- The time includes reading, decoding, collating, sending to the training process, and reading there one value per 4 kB
  page of each tensor, so that the cost of mapping memory is included.
- This loader, streaming's and the .npy files are read in shuffled order, webdataset in stored order, its best case.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import webdataset
from streaming import Stream, StreamingDataset
from streaming.base.util import bytes_to_int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from data.encoded.dataset import PREFETCH, key_seed, shared_blocks
from data.latents import LatentDataset
from precompute.encoding.columns import LatentColumns
from precompute.encoding.writer import EncodedSample, ShardWriter, Storage

RESOLUTION = 256
LATENT = (4, 32, 32)
TEXT = (77, 1024)
OURS = "this loader"
GOAL = 3000  # samples/s per core
VALUES_IN_A_PAGE = 2048


def write(folder: Path, samples: int, shard_size: str) -> None:
    """Writes the same samples to folder/mds (as precompute/encode.py does), folder/tars and folder/files."""
    rng = np.random.default_rng(0)
    columns = LatentColumns({RESOLUTION: LATENT}, TEXT)
    mds = ShardWriter(folder / "mds", "all", columns, Storage(shard_size), {})
    (folder / "tars").mkdir()
    (folder / "files").mkdir()
    bytes_per_tar = 1 << 26  # the default size of the encode job's shards
    tars = webdataset.ShardWriter(str(folder / "tars" / "%05d.tar"), maxsize=bytes_per_tar, verbose=0)
    for number in range(samples):
        key = f"{number:09d}"
        arrays = {
            "mean": rng.standard_normal(LATENT, np.float32).astype(np.float16),
            "std": rng.random(LATENT, np.float32).astype(np.float16),
            "text": rng.standard_normal(TEXT, np.float32).astype(np.float16),
        }
        row = {"key": key, "caption": f"a photograph of {number} things", "width": 512, "height": 512}
        row |= {f"{name}_{RESOLUTION}": arrays[name] for name in ("mean", "std")}
        row |= {"text": arrays["text"], f"crop_{RESOLUTION}": np.array([0, 0, 512, 512], np.int32)}
        mds.add(number, EncodedSample(row, {RESOLUTION: np.zeros((3, LATENT[0]))}))
        tars.write({"__key__": key, **{f"{name}.npy": array for name, array in arrays.items()}})
        for name, array in arrays.items():
            np.save(folder / "files" / f"{key}.{name}.npy", array)
    mds.end(samples)
    mds.finish()
    tars.close()


class StockLatents(StreamingDataset):
    """Samples as streaming decodes them. Each array is copied once more, because torch needs writable memory."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        columns = {"mean": f"mean_{RESOLUTION}", "std": f"std_{RESOLUTION}", "text": "text"}
        item = {name: torch.from_numpy(sample[column].copy()) for name, column in columns.items()}
        return {**item, "seed": key_seed(sample["key"])}


class FilesDataset(Dataset):
    """Three .npy files per sample."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.keys = sorted(path.name.split(".")[0] for path in folder.glob("*.text.npy"))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key = self.keys[index]
        names = ("mean", "std", "text")
        item = {name: torch.from_numpy(np.load(f"{self.folder}/{key}.{name}.npy")) for name in names}
        return {**item, "seed": key_seed(key)}


def _decoded(sample: dict[str, Any]) -> dict[str, Any]:
    item = {name: torch.from_numpy(sample[f"{name}.npy"]) for name in ("mean", "std", "text")}
    return {**item, "seed": key_seed(sample["__key__"])}


def _viewed(sample: dict[str, Any]) -> dict[str, Any]:
    """As `_decoded`, from the members' bytes without webdataset's decoder: a .npy file is a header and values."""
    item = {}
    for name, shape in (("mean", LATENT), ("std", LATENT), ("text", TEXT)):
        data = sample[f"{name}.npy"]
        header = 10 + int.from_bytes(data[8:10], "little")
        item[name] = torch.frombuffer(data, dtype=torch.float16, offset=header).view(shape)
    return {**item, "seed": key_seed(sample["__key__"])}


def loaders(folder: Path, batch: int, workers: int) -> dict[str, DataLoader]:
    """The readers by name. Readers in this process and in a worker cannot share a StreamingDataset."""
    common = {"num_workers": workers, "persistent_workers": workers > 0}
    common["prefetch_factor"] = PREFETCH if workers else None
    tars = sorted(map(str, (folder / "tars").glob("*.tar")))

    def local(name: str) -> dict[str, Any]:
        # streaming allows one data set per folder at a time.
        link = folder / f"{name}{workers}"
        link.symlink_to("mds")
        return {"streams": [Stream(local=str(link))], "batch_size": batch, "shuffle": True}

    ours = LatentDataset(resolution=RESOLUTION, text="text", blocks=shared_blocks(workers), **local("ours"))
    sequential = webdataset.WebDataset(tars, shardshuffle=False)
    return {
        OURS: DataLoader(ours, batch, collate_fn=ours.collate, **common),
        "streaming's reading": DataLoader(StockLatents(**local("stock")), batch, **common),
        "webdataset": DataLoader(sequential.decode().map(_decoded), batch, **common),
        "webdataset, not decoded": DataLoader(
            webdataset.WebDataset(tars, shardshuffle=False).map(_viewed), batch, **common
        ),
        ".npy files": DataLoader(FilesDataset(folder / "files"), batch, shuffle=True, **common),
    }


def fingerprints(loader: DataLoader) -> dict[int, Tensor]:
    """The samples of an epoch: the sums of each sample's arrays, by its seed."""
    found = {}
    for batch in loader:
        sums = torch.stack([batch[name].flatten(1).double().sum(1) for name in ("mean", "std", "text")], 1)
        found |= dict(zip(batch["seed"].tolist(), sums, strict=True))
    return found


def consume(batch: dict[str, Tensor]) -> int:
    """Reads from every page of a batch. Returns its number of samples."""
    for name in ("mean", "std", "text", "seed"):  # webdataset adds its keys
        batch[name].view(-1)[::VALUES_IN_A_PAGE].sum()
    return len(batch["seed"])


def cpu_clock(pid: int) -> Callable[[], float]:
    """A clock of the CPU seconds of all threads of a process (Linux only, see clock_getcpuclockid(3))."""
    clock = (~pid << 3) | 2
    return lambda: time.clock_gettime(clock)


def measure(loader: DataLoader, clocks: list[Callable[[], float]], seconds: float) -> dict[str, float]:
    """Reads whole epochs for at least this many seconds."""
    samples, wall, cpu = 0, time.perf_counter(), sum(clock() for clock in clocks)
    while True:
        samples += sum(map(consume, loader))
        passed = time.perf_counter() - wall
        if passed >= seconds:
            used = sum(clock() for clock in clocks) - cpu
            return {"per_core": samples / used, "wall": samples / passed, "cores": used / passed}


def run(folder: Path, batch: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures each reader with 0 and 1 workers; returns one row for each.

    Raises:
        ValueError: readers give different samples.
    """
    readers, expected = {}, None
    for workers in (0, 1):
        for name, loader in loaders(folder, batch, workers).items():
            before = _children()
            found = fingerprints(loader)
            expected = expected or found
            same = found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
            if not same:
                raise ValueError(f"{name} with {workers} workers delivers other samples than {OURS} in process")
            clocks = [cpu_clock(pid) for pid in {os.getpid(), *(_children() - before)}]
            assert len(clocks) == 1 + workers, clocks
            readers[name, workers] = loader, clocks
    measured: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in readers}
    for _ in range(rounds):
        for key, (loader, clocks) in readers.items():
            measured[key].append(measure(loader, clocks, seconds))
    rows = []
    for (name, workers), values in measured.items():
        medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
        spread = [round(f(value["per_core"] for value in values)) for f in (min, max)]
        rows.append({"reader": name, "workers": workers, **medians, "per_core_range": spread})
    return rows


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children()}


def columns(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table."""
    rows = []
    for row in measured:
        ours = next(r for r in measured if r["reader"] == OURS and r["workers"] == row["workers"])
        rows.append(
            {
                "reader": row["reader"],
                "workers": row["workers"] or "in process",
                "samples/s per core": round(row["per_core"]),
                "lowest to highest": "{:,} to {:,}".format(*row["per_core_range"]),
                "samples/s, wall": round(row["wall"]),
                "cores used": round(row["cores"], 2),
                "this loader does": f"{ours['per_core'] / row['per_core']:.1f}x",
            }
        )
    return rows


def goals(measured: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals were reached both in process and with a worker."""
    ours = {row["workers"]: row["per_core"] for row in measured if row["reader"] == OURS}
    others = [row for row in measured if row["reader"].startswith("webdataset")]
    return {
        f"{GOAL:,} samples/s per core": min(ours.values()) >= GOAL,
        "webdataset at least matched": all(ours[row["workers"]] >= row["per_core"] for row in others),
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive, default=1500)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of a round of one reader")
    parser.add_argument("--shard-size", default="64mb", help="size of the MDS shards")
    arguments = parser.parse_args(argv)
    try:
        bytes_to_int(arguments.shard_size)
    except ValueError:
        parser.error(f"--shard-size: {arguments.shard_size}; give a size, such as 16mb")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor is it written to
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        write(Path(folder), arguments.samples, arguments.shard_size)
        measured = run(Path(folder), arguments.batch, arguments.rounds, arguments.seconds)
    bytes_per_sample = 2 * (2 * int(np.prod(LATENT)) + int(np.prod(TEXT)))
    notes = [
        f"{arguments.samples} samples of {bytes_per_sample / 1000:.0f} kB from a warm page cache, in batches of "
        f"{arguments.batch}, MDS shards of {arguments.shard_size}; medians of {arguments.rounds} rounds of at least "
        f"{arguments.seconds:g} s, the readers taking turns. Load of the machine before: {load:.1f}.",
        "Per core: over the CPU seconds of all threads of the training process and of the worker. Collation, sending "
        "and a look at each 4 kB page of the batch are included. This loader, streaming and the files are read in "
        "shuffled order, webdataset in stored order, its best case.",
        *(f"Goal: {goal}: {'reached' if done else 'NOT reached'}." for goal, done in goals(measured).items()),
    ]
    write_results("loader", "sd2", columns(measured), "\n\n".join(notes))
    return measured


if __name__ == "__main__":
    main()
