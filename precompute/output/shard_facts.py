"""What a finished shard's files say, looked at before it is counted: a changed bit may lie in a name or a digit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from data.encoded.mds_index import check_entry

SUMS = {"mean", "square", "variance"}  # of latents, a number per channel


def wrong_fact(done: dict[str, Any]) -> str | None:
    """What cannot be right in the content of a done.json, as text; None: nothing.

    Args:
        done: as `precompute.output.shard_folder.ShardFolder.close` writes it; it has `options`.
    """
    if not isinstance(done["options"], dict):
        return f"options is {done['options']!r:.40}"
    packed = "texts" in done
    for name in ("samples", "bytes", *(("texts", "left_out") if packed else ("reencoded",))):
        if not _is_count(done.get(name)):
            return f"{name} is {done.get(name)!r:.40}"
    for name in ("rejected",) if packed else ("rejected", "upscaled"):
        if not (isinstance(done.get(name), dict) and all(map(_is_count, done[name].values()))):
            return f"{name} is {done.get(name)!r:.40}"
    if packed:
        return None
    resolutions = {str(side) for side in done["options"].get("resolutions", done["upscaled"])}
    if done["upscaled"].keys() != resolutions:
        return f"upscaled is of {', '.join(done['upscaled'])}"
    latents = done.get("latents")  # of tokens there are none
    if not isinstance(latents, dict) or (latents and latents.keys() != resolutions):
        return f"latents is {latents!r:.40}"
    wrong = next((side for side, sums in latents.items() if not _are_sums(sums)), None)
    return None if wrong is None else f"latents.{wrong} is {latents[wrong]!r:.40}"


def wrong_entry(done: dict[str, Any], entries: Any, rejected: bytes) -> str | None:
    """What in a shard's index.json or rejected.jsonl cannot be right, or not beside its done.json; None: nothing.

    Args:
        done: content of done.json.
        entries: of index.json.
        rejected: content of rejected.jsonl.
    """
    if not isinstance(entries, list):
        return f"index.json has no list of files but {entries!r:.40}"
    for number, entry in enumerate(entries):
        try:
            check_entry(entry)
        except ValueError as error:
            return f"file {number} of index.json: {error}"
    stored = sum((entry.get("zip_data") or entry["raw_data"])["bytes"] for entry in entries)
    found = {"samples": sum(entry["samples"] for entry in entries), "bytes": stored}
    for name, count in found.items():
        if count != done[name]:
            return f"{count:,} {name} in index.json, {done[name]:,} in done.json"
    lines, counted = rejected.count(b"\n"), sum(done["rejected"].values())
    return None if lines == counted else f"{lines:,} lines in rejected.jsonl, {counted:,} rejected in done.json"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_sums(sums: Any) -> bool:
    """Whether these are sums as `precompute.output.totals.moments` takes them."""
    if not isinstance(sums, dict) or sums.keys() != {"count", *SUMS} or not _is_count(sums["count"]):
        return False
    columns: Collection[Any] = [sums[name] for name in SUMS]
    lists = all(isinstance(column, list) and all(type(x) in (int, float) for x in column) for column in columns)
    return lists and len({len(column) for column in columns}) == 1
