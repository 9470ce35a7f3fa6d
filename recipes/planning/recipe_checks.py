"""Checks of a recipe against its data and this machine's disks, before anything is trained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.cost import size_text
from data.manifest import NAME as MANIFEST
from data.manifest import Manifest
from recipes.config.recipe import Recipe
from recipes.config.values import Component
from recipes.planning.finding import Finding

# What each worker reads, and has fetched ahead; a cache with less room fetches shards again and again.
SHARDS_AT_A_TIME = 8
LEAST_SHARDS = 4  # with less, streaming does not begin


def cheap_recipe_checks(recipe: Recipe) -> Iterator[Finding]:
    """What every run is checked for when it starts: milliseconds, without torch."""
    sets = local_manifests(recipe)
    yield from encoders(sets)
    yield from caches(recipe, sets)


def recipe_checks(recipe: Recipe, missing: list[str]) -> Iterator[Finding]:
    """All checks of a recipe. The model is built without memory for weights, which takes seconds.

    Args:
        recipe: checked for its keys and values.
        missing: input paths that do not exist, one line each.
    """
    from recipes.planning.dry_run import disk_bytes, survey

    yield from (Finding("error", "input", f"not there: {path}") for path in missing)
    yield from cheap_recipe_checks(recipe)
    try:
        found = survey(recipe)
    except (ValueError, FileNotFoundError) as error:
        yield Finding("error", "recipe", str(error))
        return
    yield Finding("ok", "recipe", "model, batch, data and options fit each other")
    yield disk(Path(recipe.output), disk_bytes(recipe, found))


def local_manifests(recipe: Recipe) -> dict[str, Manifest]:
    """The manifests of the recipe's encoded sets that are on this machine, by the keys of their streams."""
    found = {}
    for key, stream in _streams(recipe):
        folder = stream.args.get("path") or stream.args.get("cache")
        if folder and Path(folder, MANIFEST).is_file():
            found[key] = Manifest.read(Path(folder))
    return found


def encoders(sets: dict[str, Manifest]) -> Iterator[Finding]:
    """Whether all sets were encoded with the same weights: latents of two VAEs are in two spaces.

    Args:
        sets: manifests by key, training data first.
    """
    if len(sets) < 2:
        return
    (first, reference), *others = sets.items()
    for kind in ("image_encoder", "text_encoder"):
        wanted = _weights(reference, kind)
        for key, manifest in others:
            if _weights(manifest, kind) != wanted:
                yield Finding(
                    "error",
                    "encoders",
                    f"{key} and {first} were encoded with different weights of the {kind.replace('_', ' ')}: encode "
                    "one of them again",
                )
                return
    yield Finding("ok", "encoders", f"the same in {len(sets)} sets")


def _weights(manifest: Manifest, kind: str) -> Any:
    return (getattr(manifest, kind) or {}).get("weights_hash")


def caches(recipe: Recipe, sets: dict[str, Manifest]) -> Iterator[Finding]:
    """Whether the cache of a remote set has room for the shards that are read at a time."""
    for label, data in _data(recipe):
        limit = data.args.get("cache_limit")
        if limit is None:
            continue
        sizes = [_largest_shard(stream) for key, stream in _streams(recipe) if key.startswith(f"{label}.")]
        largest = max((size for size in sizes if size is not None), default=None)
        if largest is None:
            continue
        from streaming.base.util import bytes_to_int

        room = bytes_to_int(limit)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # of a machine, which share the cache
        at_a_time = SHARDS_AT_A_TIME * max(1, int(data.args.get("workers") or 0)) * ranks
        text = f"{label}.cache_limit is {limit}, shards have up to {size_text(largest)}"
        if room < at_a_time * largest:
            yield Finding(
                "error" if room < LEAST_SHARDS * largest else "warning",
                "cache",
                f"{text}, and {at_a_time} of them are needed at a time, so that none is fetched twice: give "
                f"{size_text(at_a_time * largest)} or more",
            )
        else:
            yield Finding("ok", "cache", text)


def _largest_shard(stream: Component) -> int | None:
    """Bytes of a set's largest shard, raw and compressed together; None: its index is not on this machine."""
    folder = stream.args.get("path") or stream.args.get("cache")
    index = Path(folder or "", "index.json")
    if not folder or not index.is_file():
        return None
    shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
    parts = (("raw_data", "zip_data") if shard.get("zip_data") else ("raw_data",) for shard in shards)
    sizes = (sum(shard[part]["bytes"] for part in names) for shard, names in zip(shards, parts, strict=True))
    return max(sizes, default=None)


def disk(output: Path, needed: int, free: Callable[[Path], int] | None = None) -> Finding:
    """Whether the checkpoints of a run fit on the disk of its folder.

    Args:
        output: folder of the run, which need not exist.
        needed: bytes that the run keeps there at the same time.
        free: bytes that are free in a folder; None: asks the operating system.
    """
    folder = output.absolute()
    while not folder.is_dir():
        folder = folder.parent
    left = shutil.disk_usage(folder).free if free is None else free(folder)
    if left < needed:
        return Finding(
            "error",
            "disk",
            f"{size_text(left)} free for {output}, and the run's checkpoints take {size_text(needed)}: lower "
            "checkpoints.keep, or set `output`",
        )
    return Finding("ok", "disk", f"{size_text(needed)} for checkpoints, {size_text(left)} free")


def _data(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    yield "data", recipe.data
    yield from ((f"evals.{label}", component) for label, component in recipe.evals.items())


def _streams(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    for label, data in _data(recipe):
        for name, stream in (data.args.get("streams") or {}).items():
            yield f"{label}.streams.{name}", stream
