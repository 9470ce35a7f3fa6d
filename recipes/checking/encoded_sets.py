"""Checks of a recipe's encoded sets: their encoders, the caches of remote ones, and their shards."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from typing import Any

from data.cost import count_text, size_text
from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from data.encoded.mds_index import INDEX, read_index
from data.encoded.stale_memory import MEMORY
from data.encoded.text_manifest import NAME as TEXT_MANIFEST
from data.ranges import bytes_of
from recipes.checking.finding import Finding
from recipes.config.recipe import Recipe
from recipes.config.schema import read_signature
from recipes.config.values import Component
from recipes.planning.inputs import data_of, folder_of, streams_of

# What each worker reads, and has fetched ahead; a cache with less room fetches shards again and again.
SHARDS_AT_A_TIME = 8
LEAST_SHARDS = 4  # with less, streaming does not begin
ORDER_BYTES = 8  # per sample: streaming keeps the order of an epoch in shared memory while its workers take their parts


def fetch_indexes(recipe: Recipe) -> Iterator[Finding]:
    """Fetch the manifests and indexes of remote sets that are not on this machine yet, as a run does when it starts.

    The other checks of such a set know nothing without them. What a store refuses is found here, too.
    """
    from recipes.config.build import build

    for label, data in data_of(recipe):
        for name, stream in (data.args.get("streams") or {}).items():
            if not stream.args.get("cache"):
                continue
            try:
                encoded = build(stream)
                encoded.file(TEXT_MANIFEST if data.name == "texts" else MANIFEST)
                encoded.file(INDEX)
            except (ValueError, OSError) as error:
                key = f"{label}.streams.{name}"
                yield Finding("error", "input", f"{key}: {str(error).removeprefix(f'{key}: ')}")


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


def caches(recipe: Recipe) -> Iterator[Finding]:
    """Whether the cache of a remote set has room for the shards that are read at a time."""
    for label, data in data_of(recipe):
        limit = data.args.get("cache_limit")
        if limit is None:
            continue
        room = bytes_of(limit)
        if room is None:
            yield Finding("error", "cache", f"{label}.cache_limit is {limit}; give a size such as 100gb")
            continue
        sizes = [
            sum(shard[part]["bytes"] for part in ("raw_data", "zip_data") if shard.get(part))
            for key, stream in streams_of(recipe)
            if key.startswith(f"{label}.")
            for shard in _shards(stream)
        ]
        if not sizes:
            continue
        largest = max(sizes)
        at_a_time = SHARDS_AT_A_TIME * max(1, _workers(data)) * _local_world()  # a machine's ranks share the cache
        mixed = _mixed(recipe, data) if label == "data" else 0
        needed = max(at_a_time * largest, mixed)
        text = f"{label}.cache_limit is {limit}, shards have up to {size_text(largest)}"
        if room < needed:
            smaller = f", or a smaller {label}.shuffle_block" if needed == mixed else ""
            yield Finding(
                "error" if room < LEAST_SHARDS * largest else "warning",
                "cache",
                f"{text}, and on {count_text(_machines(), 'machine')} each needs {size_text(needed)} of them at a "
                f"time, so that none is fetched twice in an epoch: give as much{smaller}",
            )
        else:
            yield Finding("ok", "cache", text)


def _mixed(recipe: Recipe, data: Component) -> int:
    """Bytes of the remote shards from which a machine reads at a time in training. The shuffle spreads the samples of
    a shard over a part of the epoch, in which the shard must stay in the cache.

    `streaming`'s py1e spreads them over 1.25 blocks at most, py1br over two, py1s and py2s over a 64th of a machine's
    share, naive over the epoch.
    """
    args, machines = data.args, _machines()
    if not args.get("shuffle", True):
        return 0
    sets = [(stream, _shards(stream)) for key, stream in streams_of(recipe) if key.startswith("data.")]
    samples = sum(shard["samples"] for _, found in sets for shard in found)
    remote = sum(shard["raw_data"]["bytes"] for stream, found in sets if stream.args.get("cache") for shard in found)
    algorithm, share = args.get("shuffle_algo", "py1e"), samples / machines
    block = args.get("shuffle_block") or max(4_000_000 // machines, 1 << 18)
    spread = {"py1e": 1.25 * block, "py1br": 2 * block, "naive": samples}.get(algorithm, share / 64)
    ahead = args.get("predownload") or 8 * recipe.training.global_batch // int(os.environ.get("WORLD_SIZE") or 1)
    at_a_time = spread + ahead * max(1, _workers(data)) * _local_world()
    return math.ceil(remote * min(at_a_time, samples if algorithm == "naive" else share) / max(1, samples))


def hashes(recipe: Recipe) -> Iterator[Finding]:
    """Whether the shards of each set have the hash that they are to be compared with."""
    for key, stream in streams_of(recipe):
        asked = stream.args.get("validate_hash")
        for shard in _shards(stream) if asked else ():
            known = shard["raw_data"].get("hashes") or {}
            if asked not in known:
                text = f"{key}.validate_hash is {asked}, and the set was written with {', '.join(known) or 'none'}"
                yield Finding("error", "hashes", f"{text}; encode with hashes=[{asked}], or set it to null")
                break


def shards(recipe: Recipe) -> Iterator[Finding]:
    """Whether the training data has parts enough for the processes that read it.

    streaming gives each machine a share of an epoch's samples, whose ranks take turns at them, and their workers at
    batches. So workers need no shards of their own: a shard is fetched once per machine. There are three limits.
    A machine fetches whole shards, however few of their samples are its own, a worker with no batch has no work, and
    the order of an epoch must fit into shared memory.
    """
    label, data = next(data_of(recipe))
    streams = [stream for key, stream in streams_of(recipe) if key.startswith(f"{label}.")]
    found = [_shards(stream) for stream in streams]
    if not found or not all(found):
        return
    world, workers = int(os.environ.get("WORLD_SIZE") or 1), _workers(data)
    number, machines = sum(map(len, found)), _machines()
    remote = any(stream.args.get("cache") for stream in streams)
    text = f"{label}: {count_text(number, 'shard')}, {count_text(machines, 'machine')}"
    if remote and number < machines:
        yield Finding("warning", "shards", f"{text}: machines fetch the same shards; encode with a smaller size_limit")
        return
    samples = sum(shard["samples"] for parts in found for shard in parts)
    batches, incomplete = divmod(samples, recipe.training.global_batch)
    if incomplete and not data.args.get("drop_last", True):
        batches += 1
    chosen = data.args.get("epoch_size") or any(s.args.get("proportion") or s.args.get("repeat") for s in streams)
    if not chosen and 0 < batches < workers:
        yield Finding(
            "warning",
            "shards",
            f"{label}.workers: {workers} per rank, and an epoch has {count_text(batches, 'batch', 'batches')} of each "
            f"rank, so {workers - batches} do nothing: give {batches}",
        )
        return
    order, room = ORDER_BYTES * samples, shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    if not chosen and 0 < room < order:
        yield Finding(
            "warning",
            "shards",
            f"{label}: an epoch's order takes {size_text(order)} in {MEMORY} of each machine, {size_text(room)} are "
            f"free: start the container with a larger --shm-size, or set {label}.epoch_size",
        )
        return
    yield Finding("ok", "shards", f"{text}, {count_text(world * workers, 'worker')}")


def _shards(stream: Component) -> list[dict[str, Any]]:
    """What the index of a set says of its shards; none if it is not on this machine."""
    folder = folder_of(stream)
    if folder is None or not (folder / INDEX).is_file():
        return []
    return read_index(folder)


def _workers(data: Component) -> int:
    known = read_signature(data.target).parameters
    return int(data.args.get("workers", known["workers"].default)) if "workers" in known else 0


def _local_world() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _machines() -> int:
    return max(1, int(os.environ.get("WORLD_SIZE") or 1) // _local_world())
