"""Time and memory of what is done once for all shards of a set: by an encode job, by verify.py, and by training.

The set for merging has small index entries and files of zeros that take no room on the disk. Look-ups on a file system
that other machines share wait for a server: they are imitated by a pause before each look-up and each opening of a
file. The set for verify.py has real MDS files, with the columns of Stable Diffusion 2 at 256. Each part runs in a
process of its own; a second checkout of this repository can be measured beside this one, and its results are compared.

    python benchmarks/encoded_shards.py                                 # 20,000 shards, 1 GB in the temporary folder
    python benchmarks/encoded_shards.py --shards 100000 --against ../before --workers 1 2 4
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import builtins
import hashlib
import io
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common.options import positive

COLUMNS = {
    "key": "str",
    "caption": "str",
    "width": "int",
    "height": "int",
    "crop_256": "ndarray:int32:4",
    "mean_256": "ndarray:float16:4,32,32",
    "std_256": "ndarray:float16:4,32,32",
    "text": "ndarray:float16:77,1024",
}
OPTIONS = {f"option{number}": f"{number:064d}" for number in range(12)}
SAMPLES = 384  # of an MDS file of 64 MB


def write_small(folder: Path, shards: int, files: int) -> None:
    """Finished shards whose files are holes."""
    names = sorted(COLUMNS)
    for number in range(shards):
        shard = f"{number:05d}-{number:08x}"
        own = folder / "shards" / shard
        own.mkdir(parents=True)
        entries = []
        for file in range(files):
            raw = {"basename": f"shard.{file:05d}.mds", "bytes": 1 << 26, "hashes": {"xxh3_64": f"{number:016x}"}}
            with open(own / raw["basename"], "wb") as hole:
                hole.truncate(1 << 26)
            kinds = {"column_names": names, "column_encodings": [COLUMNS[name] for name in names]}
            entries.append(
                {
                    "samples": SAMPLES,
                    "raw_data": raw,
                    "zip_data": None,
                    "version": 2,
                    "format": "mds",
                    "compression": None,
                    "hashes": ["xxh3_64"],
                    "size_limit": 1 << 26,
                    **kinds,
                    "column_sizes": [None, 16, 8, None, 8192, 8192, 157696, 8],
                }
            )
        (own / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
        rejected = {"key": "key", "shard": shard, "reason": "too_small", "detail": "20x20 for 256"}
        (own / "rejected.jsonl").write_text(json.dumps(rejected) + "\n")
        sums = {"count": SAMPLES * files, **{name: [0.1 * number] * 4 for name in ("mean", "square", "variance")}}
        done = {
            "shard": shard,
            "samples": SAMPLES * files,
            "rejected": {"too_small": 1},
            "bytes": files << 26,
            "reencoded": 0,
            "upscaled": {"256": 0},
            "seconds": 1.0,
            "latents": {"256": sums},
            "options": OPTIONS,
        }
        (own / "done.json").write_text(json.dumps(done, indent=1))


def write_index(folder: Path, files: int) -> None:
    """The index of a set of this many files, which are not there, as `write_small` writes those of shards."""
    with tempfile.TemporaryDirectory() as temporary:
        write_small(Path(temporary), 1, 1)
        (entry,) = json.loads(next(Path(temporary).glob("shards/*/index.json")).read_text())["shards"]
    folder.mkdir()
    with open(folder / "index.json", "w") as index:
        index.write('{"version": 2, "shards": [')
        for number in range(files):
            name = f"shards/{number // 8:05d}-{number // 8:08x}/shard.{number % 8:05d}.mds"
            raw = entry["raw_data"] | {"basename": name, "hashes": {"xxh3_64": f"{number:016x}"}}
            index.write((", " if number else "") + json.dumps(entry | {"raw_data": raw}))
        index.write("]}\n")


def write_large(folder: Path, files: int) -> None:
    """A set of random values in files of 64 MB, with its manifest."""
    import numpy as np

    from data.encoded.manifest import Manifest
    from precompute.output.mds_files import MDSFiles

    rng = np.random.default_rng(0)
    entries = []
    for number in range(files):
        own = folder / "shards" / f"{number:05d}-a"
        with MDSFiles(out=str(own), columns=COLUMNS, hashes=["xxh3_64"], size_limit=1 << 30) as out:
            for row in range(SAMPLES):
                arrays = {name: rng.standard_normal((4, 32, 32), np.float32) for name in ("mean_256", "std_256")}
                arrays["text"] = rng.standard_normal((77, 1024), np.float32)
                values = {name: array.astype(np.float16) for name, array in arrays.items()}
                texts = {"key": f"{row:09d}", "caption": "caption " * (row % 9)}
                out.write({**texts, "width": 512, "height": 512, "crop_256": np.zeros(4, np.int32), **values})
        (entry,) = json.loads((own / "index.json").read_text())["shards"]
        entry["raw_data"]["basename"] = f"shards/{own.name}/{entry['raw_data']['basename']}"
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    sizes = {"channels": 4, "downsample": 8, "scaling_factor": 1.0, "shift_factor": 0.0}
    Manifest(
        image_encoder={"component": {}, "weights_hash": "", **sizes},
        text_encoder=None,
        resolutions=[256],
        crop="center",
        upscale=False,
        seed=0,
        filter={},
        dtype="float16",
        normalisation="",
        caption_policy="",
        columns=COLUMNS,
        samples=SAMPLES * files,
        rejected={},
        reencoded=0,
        upscaled={},
        shards=files,
        bytes=sum(entry["raw_data"]["bytes"] for entry in entries),
        latents={},
        request={},
        software={},
    ).write(folder)


def merge(folder: Path, workers: int) -> Any:
    """Writes the index and the rejected samples of all shards; returns what was written and counted."""
    from precompute.output.output_set import OutputSet
    from precompute.output.totals import totals

    counted = totals(OutputSet(folder, sorted(os.listdir(folder / "shards"))).join(OPTIONS))
    return [counted, *(hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in RESULTS)]


def look(folder: Path, workers: int) -> Any:
    """Looks which shards are not done."""
    from precompute.output.output_set import OutputSet

    return OutputSet(folder, sorted(os.listdir(folder / "shards"))).remaining()


def verify(folder: Path, workers: int) -> Any:
    """Reads all files of a set, as verify.py does."""
    import numpy as np

    from data.encoded.manifest import Manifest
    from precompute.checking.survey import figures, survey

    arguments = [folder, Manifest.read(folder), 8, np.random.default_rng(0)]
    found = survey(*arguments, workers) if workers else survey(*arguments)
    records = [[record.shard, record.key, record.caption] for record in found.records]
    arrays = {name: [record.arrays[name].tolist() for record in found.records] for name in ("mean_256", "crop_256")}
    return [figures(found), found.faults, records, hashlib.sha256(json.dumps(arrays).encode()).hexdigest()]


def tars(folder: Path, workers: int) -> Any:
    """Lists local tars, as each process of a job does at its start."""
    from data.sources.tars import TarSource

    last = len(os.listdir(folder)) - 1
    return hashlib.sha256("".join(TarSource(urls=f"{folder}/{{000000..{last:06d}}}.tar").shards()).encode()).hexdigest()


def readers(folder: Path, workers: int) -> Any:
    """Makes this project's readers of all files from streaming's, as each rank does when training starts."""
    from data.encoded.column_reader import column_readers

    found = column_readers(_streaming_readers, {"mean": "mean_256", "std": "std_256", "text": "text"})
    return [len(found), str(found[-1].arrays), found[-1].path]


def open_set(folder: Path, workers: int) -> Any:
    """Opens a set from its index, as each rank does when training starts."""
    from data.encoded.fetching import WholeStream
    from data.latents import LatentDataset

    streams = [WholeStream(local=str(folder))]
    found = LatentDataset(resolution=256, text="text", streams=streams, batch_size=64, shuffle=True)
    places = [tuple(map(int, found.spanner[sample])) for sample in range(0, found.num_samples, 9999)]
    digest = hashlib.sha256(json.dumps([places, [shard.path for shard in found.shards]]).encode()).hexdigest()
    return [found.num_samples, digest]


_streaming_readers: list[Any] = []  # made before the time is taken


def prepare_readers(folder: Path) -> None:
    """Streaming's readers of all files in an index."""
    from streaming.base.format import reader_from_json

    entries = json.loads((folder / "index.json").read_text())["shards"]
    _streaming_readers[:] = [reader_from_json(str(folder), "", entry) for entry in entries]


PARTS = {"merge": merge, "look": look, "open": open_set, "readers": readers, "tars": tars, "verify": verify}
RESULTS = ("index.json", "rejected.jsonl")


def paused(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """A function that waits first."""

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments, **options)

    return slow


def in_child(part: str, folder: str, pause: float, workers: int) -> None:
    """Runs a part in this process and prints the result, its seconds and the memory that it took."""
    if part == "readers":
        prepare_readers(Path(folder))
    elif part == "open":
        import data.latents  # noqa: F401
    elif part == "verify":
        import precompute.checking.survey  # what it takes to import it is not measured
    else:
        import precompute.output.output_set
        import precompute.output.totals  # noqa: F401

    before = most_memory()
    if pause:
        os.stat = paused(os.stat, pause)
        builtins.open = io.open = paused(io.open, pause)
    began, busy = time.monotonic(), cpu_seconds()
    result = PARTS[part](Path(folder), workers)
    seconds, busy = time.monotonic() - began, cpu_seconds() - busy
    memory = most_memory() - before
    print(json.dumps({"seconds": seconds, "cpu": busy, "memory": memory, "result": result}))


def most_memory() -> float:
    """The most that this process has had so far, in MB. (`getrusage` counts its parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1e3


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))


def measured(root: Path, part: str, folder: Path, pause: float = 0.0, workers: int = 0) -> dict[str, Any]:
    """Runs a part with the code of a checkout, in a new process."""
    arguments = [str(root), part, str(folder), str(pause), str(workers)]
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=positive, default=20_000, help="of the set that is merged")
    parser.add_argument("--files", type=positive, default=1, help="MDS files of each of these")
    parser.add_argument("--index", type=positive, default=100_000, help="MDS files in the index that is opened")
    parser.add_argument("--large", type=positive, default=12, help="MDS files of 64 MB of the set that is verified")
    parser.add_argument("--pause", type=float, default=0.5, help="milliseconds of a look-up in the imitated network")
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--against", help="another checkout, whose code is measured in turns")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        root, part, folder, pause, workers = options.child
        sys.path[0] = root
        in_child(part, folder, float(pause), int(workers))
        return
    from benchmarks.common.reporting import write_results

    if options.against and not (Path(options.against).expanduser() / "precompute" / "checking" / "survey.py").is_file():
        parser.error(f"--against: {options.against} is no checkout of this repository with precompute/checking")
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="shards-") as temporary:
        small, inputs, large = Path(temporary, "small"), Path(temporary, "inputs"), Path(temporary, "large")
        write_small(small, options.shards, options.files)
        inputs.mkdir()
        for number in range(options.shards):
            (inputs / f"{number:06d}.tar").touch()
        write_index(Path(temporary, "index"), options.index)
        write_large(large, options.large)
        pause = options.pause / 1e3
        network = f", {options.pause:g} ms per look-up"
        parts = [
            ("merge", "merge", small, 0.0, [0]),
            ("merge", f"merge{network}", small, pause, [0]),
            ("look", "which shards are done", small, 0.0, [0]),
            ("look", f"which shards are done{network}", small, pause, [0]),
            ("readers", "readers of all files", small, 0.0, [0]),
            ("open", f"opening an index of {options.index:,} files", Path(temporary, "index"), 0.0, [0]),
            ("tars", "listing of the tars", inputs, 0.0, [0]),
            ("tars", f"listing of the tars{network}", inputs, pause, [0]),
            ("verify", "verify", large, 0.0, options.workers),
        ]
        for part, name, folder, wait, numbers in parts:
            old: list[dict[str, Any]] = []
            new: dict[int, list[dict[str, Any]]] = {workers: [] for workers in numbers}
            for _ in range(options.rounds):
                if options.against:
                    old.append(measured(Path(options.against).expanduser().resolve(), part, folder, wait))
                for workers in numbers:
                    new[workers].append(measured(ROOT, part, folder, wait, workers))
            for workers, found in new.items():
                row = {"part": name + (f", {workers} processes" if workers else "")}
                row |= {"s": f"{best(found):.2f}", "CPU s": f"{best(found, 'cpu'):.2f}"}
                row |= {"MB": f"{found[0]['memory']:.0f}"}
                if old:
                    same = all(one["result"] == old[0]["result"] for one in (*old, *found))
                    row |= {"before, s": f"{best(old):.2f}", "before, CPU s": f"{best(old, 'cpu'):.2f}"}
                    row |= {"before, MB": f"{old[0]['memory']:.0f}", "time": f"1 / {best(old) / best(found):.1f}"}
                    row |= {"CPU time": f"1 / {best(old, 'cpu') / best(found, 'cpu'):.1f}"}
                    row |= {"same result": "yes" if same else "NO"}
                rows.append(row)
        size = sum(file.stat().st_size for file in large.rglob("*.mds")) / 1e9
    notes = (
        f"{options.shards:,} shards of {options.files} MDS files are merged, and as many tars listed; {size:.2f} GB in "
        f"{options.large} files, in the page cache, are verified. The least of {options.rounds} rounds, in turns. MB: "
        f"memory of the main process, above what it takes before. Load of the machine before: {load:.1f}."
    )
    write_results("encoded_shards", f"{options.shards}", rows, notes)


def best(found: list[dict[str, Any]], kind: str = "seconds") -> float:
    """The least seconds."""
    return min(one[kind] for one in found)


if __name__ == "__main__":
    main()
