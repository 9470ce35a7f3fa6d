"""The counts and statistics of a set, from those of its shards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any


def totals(markers: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts and statistics in a set's manifest.

    Args:
        markers: contents of every shard's done.json (see `precompute.encoding.writer.ShardWriter.finish`).

    Returns:
        The fields samples, shards, bytes, reencoded, rejected, upscaled and latents of
        `data.encoded.manifest.Manifest`.
    """
    resolutions = list(markers[0]["upscaled"]) if markers else []
    statistics = list(markers[0]["latents"]) if markers else []
    return {
        "samples": sum(marker["samples"] for marker in markers),
        "shards": len(markers),
        "bytes": sum(marker["bytes"] for marker in markers),
        "reencoded": sum(marker["reencoded"] for marker in markers),
        "rejected": rejected(markers),
        "upscaled": {r: sum(marker["upscaled"][r] for marker in markers) for r in resolutions},
        "latents": {r: moments([marker["latents"][r] for marker in markers]) for r in statistics},
    }


def rejected(markers: list[dict[str, Any]]) -> dict[str, int]:
    """The number of rejected samples by reason, in the order of reasons. `markers` as of `totals`."""
    return dict(sorted(sum((Counter(marker["rejected"]) for marker in markers), Counter()).items()))


def moments(sums: list[dict[str, Any]]) -> dict[str, list[float]]:
    """mean, std and sample_std per channel, from sums of the posterior's mean, squared mean and variance."""

    def total(name: str) -> list[float]:
        return [math.fsum(column) for column in zip(*(s[name] for s in sums), strict=True)]

    count = max(1, sum(s["count"] for s in sums))
    mean = [x / count for x in total("mean")]
    variance = [max(0.0, x / count - m * m) for x, m in zip(total("square"), mean, strict=True)]
    drawn = [v + x / count for v, x in zip(variance, total("variance"), strict=True)]
    return {"mean": mean, "std": [math.sqrt(v) for v in variance], "sample_std": [math.sqrt(v) for v in drawn]}


def counts_text(counts: Iterable[tuple[str, int]]) -> str:
    """Counts by name as text, such as "too_small 12, broken_image 1"; "none" where there are none."""
    return ", ".join(f"{name} {count:,}" for name, count in counts) or "none"
