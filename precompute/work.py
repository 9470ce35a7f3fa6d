"""Which rank does what, what is done, and how the parts become one set. Ranks share nothing but the output folder.

OUT/options.json              what the values depend on; the first process claims the folder with it
OUT/shards/<id>.tmp-<rank>/   being written
OUT/shards/<id>/              complete: MDS files, index.json, rejected.jsonl and done.json, renamed into place at once
OUT/null_text.npy             the null caption's embedding, where captions are embedded
OUT/index.json, OUT/rejected.jsonl, OUT/manifest.json    merged, the manifest last, by whoever finds all shards done
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data.files import atomic_write, write_json
from data.manifest import NAME, NULL_TEXT, REJECTED, Manifest

OPTIONS = "options.json"
DONE = "done.json"
INDEX = "index.json"
STALE = 3600.0  # seconds since its last change after which an unfinished folder of a finished shard is removed

Item = TypeVar("Item")


@dataclass(frozen=True)
class Rank:
    """This process among those of the job, as `composer -n`, `torchrun` or a scheduler numbers them.

    Attributes:
        rank, world: number of this process, and of all.
        local: number of this process on its machine, which is its GPU.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Rank:
        """RANK, WORLD_SIZE and LOCAL_RANK, as the launchers set them.

        Raises:
            ValueError: one of them is no number, or they do not fit together.
        """
        values = {}
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name) or default
            if not text.isdecimal():
                raise ValueError(f"{name} is {text!r} in the environment: expected a number")
            values[name] = int(text)
        rank, world, local = values.values()
        if rank >= world:
            raise ValueError(f"RANK is {rank} of WORLD_SIZE {world} in the environment: ranks count from 0")
        return cls(rank, world, local)

    def share(self, items: list[Item]) -> list[Item]:
        """Item k goes to rank k mod world.

        Applied to all shards, done or not: a share of the remaining ones would differ between ranks that list them at
        different moments. Ranks advance evenly, so what remains after an interruption is even too.
        """
        return items[self.rank :: self.world]


class EncodedSet:
    """One output folder and the shards that belong into it.

    Args:
        out: the folder.
        shards: ids of the source's shards, in order.
    """

    def __init__(self, out: str | Path, shards: list[str]) -> None:
        self.out = Path(out)
        self.shards = shards

    def folder(self, shard: str) -> Path:
        """Where a finished shard lies."""
        return self.out / "shards" / shard

    def partial(self, shard: str, rank: int) -> Path:
        """Where a rank writes a shard."""
        return self.out / "shards" / f"{shard}.tmp-{rank}"

    def is_done(self, shard: str) -> bool:
        return (self.folder(shard) / DONE).is_file()

    def remaining(self) -> list[str]:
        """Shards not yet done, in order."""
        # One listing instead of a look-up a shard: on network disks a job has tens of thousands.
        try:
            present = {entry.name for entry in os.scandir(self.out / "shards")}
        except FileNotFoundError:
            present = set()
        return [shard for shard in self.shards if shard not in present or not self.is_done(shard)]

    def samples_a_shard(self) -> float | None:
        """Average size of a few finished shards, rejected samples included; None without any."""
        finished = [shard for shard in self.shards[:50] if self.is_done(shard)][:5]
        markers = [self._done(shard) for shard in finished]
        sizes = [marker["samples"] + sum(marker["rejected"].values()) for marker in markers]
        return sum(sizes) / len(sizes) if sizes else None

    def is_complete(self, request: dict[str, Any]) -> bool:
        """Whether every shard is done and merged, and was made for the same request."""
        embedded = request.get("text_encoder", NULL_TEXT) is not None  # a set of tokens has no text encoder
        needed = [INDEX, NULL_TEXT] if embedded else [INDEX]
        if self.remaining() or not all((self.out / name).is_file() for name in needed):
            return False
        try:
            manifest = Manifest.read(self.out)
        except (FileNotFoundError, ValueError):
            return False
        return manifest.request == _json(request) and manifest.shards == len(self.shards)

    def claim(self, options: dict[str, Any]) -> None:
        """Ties the folder to the options that its values depend on.

        Raises:
            ValueError: it holds values made with others; the message names the first field that differs.
        """
        (self.out / "shards").mkdir(parents=True, exist_ok=True)
        path = self.out / OPTIONS
        if not path.is_file():
            for shard in self.shards:
                if self.is_done(shard):
                    self._compare(self._done(shard)["options"], options)
            partial = self.out / f".{OPTIONS}.{os.uname().nodename}.{os.getpid()}"
            partial.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
            try:
                os.link(partial, path)  # unlike a rename, fails where another rank was first
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        self._compare(_read_json(path), options)

    def _compare(self, found: dict[str, Any], options: dict[str, Any]) -> None:
        options = _json(options)
        for name in [*options, *found]:
            if found.get(name) != options.get(name):
                raise ValueError(
                    f"{self.out}: holds values made with {name} {found.get(name)}, this job has {options.get(name)}; "
                    "give another `out`, or delete the folder to encode again"
                )

    def publish(self, shard: str, rank: int) -> None:
        """Makes a written shard visible as done, all at once. Harmless where another rank was first."""
        partial, final = self.partial(shard, rank), self.folder(shard)
        for path in partial.iterdir():  # on disk before the name: a machine that loses power must not leave a husk
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if final.is_dir() and not self.is_done(shard):
            shutil.rmtree(final)
        try:
            os.rename(partial, final)
        except OSError:
            if not self.is_done(shard):
                raise
            shutil.rmtree(partial)

    def _done(self, shard: str) -> dict[str, Any]:
        return _read_json(self.folder(shard) / DONE)

    def merge(self, describe: dict[str, Any]) -> Manifest:
        """Index, list of rejected samples and manifest of all shards, each written at once, the manifest last.

        Args:
            describe: the manifest's fields that are not counted from the shards, and `options`.

        Raises:
            ValueError: shards made with other options, or a set without a sample.
        """
        options = describe.pop("options")
        entries, rejected_lines, markers = [], [], []
        for shard in self.shards:
            marker = self._done(shard)
            self._compare(marker["options"], options)
            markers.append(marker)
            for info in _read_json(self.folder(shard) / INDEX)["shards"]:
                # `streaming.base.util.merge_index` keeps one folder level only.
                for data in (info[key] for key in ("raw_data", "zip_data") if info.get(key)):
                    data["basename"] = f"shards/{shard}/{data['basename']}"
                entries.append(info)
            rejected_lines.append((self.folder(shard) / REJECTED).read_bytes())
        counted = _count(markers)
        if not counted["samples"]:
            reasons = ", ".join(f"{reason} {n}" for reason, n in counted["rejected"].items()) or "the source is empty"
            raise ValueError(f"{self.out}: no picture was encoded ({reasons}); see shards/*/{REJECTED}")
        write_json(self.out / INDEX, {"version": 2, "shards": entries})
        with atomic_write(self.out / REJECTED) as partial:
            partial.write_bytes(b"".join(rejected_lines))
        manifest = Manifest(**describe, **counted, where=str(self.out / NAME))
        manifest.write(self.out)
        self._sweep()
        return manifest

    def _sweep(self) -> None:
        """Removes what killed processes left of shards that are done by now."""
        for path in (self.out / "shards").glob("*.tmp-*"):
            if self.is_done(path.name.rpartition(".tmp-")[0]) and time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)

    def strangers(self) -> int:
        """Finished shards in the folder that the source does not have; they are left out of the index."""
        known = set(self.shards)
        return sum(1 for path in (self.out / "shards").glob(f"*/{DONE}") if path.parent.name not in known)


def _count(markers: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's counts and statistics from those of the shards."""
    rejected: Counter[str] = Counter()
    for marker in markers:
        rejected.update(marker["rejected"])
    resolutions = list(markers[0]["upscaled"]) if markers else []
    statistics = list(markers[0]["latents"]) if markers else []
    return {
        "samples": sum(marker["samples"] for marker in markers),
        "shards": len(markers),
        "bytes": sum(marker["bytes"] for marker in markers),
        "reencoded": sum(marker["reencoded"] for marker in markers),
        "rejected": dict(sorted(rejected.items())),
        "upscaled": {r: sum(marker["upscaled"][r] for marker in markers) for r in resolutions},
        "latents": {r: _moments([marker["latents"][r] for marker in markers]) for r in statistics},
    }


def _moments(sums: list[dict[str, Any]]) -> dict[str, list[float]]:
    """mean, std and sample_std by channel, from sums of the posterior's mean, mean squared and variance."""

    def total(name: str) -> list[float]:
        return [math.fsum(column) for column in zip(*(s[name] for s in sums), strict=True)]

    count = max(1, sum(s["count"] for s in sums))
    mean = [x / count for x in total("mean")]
    variance = [max(0.0, x / count - m * m) for x, m in zip(total("square"), mean, strict=True)]
    drawn = [v + x / count for v, x in zip(variance, total("variance"), strict=True)]
    return {"mean": mean, "std": [math.sqrt(v) for v in variance], "sample_std": [math.sqrt(v) for v in drawn]}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); delete its folder and start again") from None


def _json(value: Any) -> Any:
    """As it comes back from a file: lists for tuples, text for keys."""
    return json.loads(json.dumps(value))


def summary(rejected: Iterable[tuple[str, int]]) -> str:
    """Counts by reason as one phrase."""
    return ", ".join(f"{reason} {count:,}" for reason, count in rejected) or "none"
