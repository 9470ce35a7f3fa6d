"""One rank's part of an encode job, from the checked config to finished folders."""

from __future__ import annotations

import io
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import torch

from data.manifest import NULL_TEXT, Manifest, write_atomically
from precompute.config import EncodeConfig
from precompute.decode import Decoder, Job, Preparation, batches
from precompute.pipeline import Pipeline
from precompute.progress import Progress, duration
from precompute.work import EncodedSet, Rank, summary
from precompute.writer import Columns, ShardWriter, Storage, TokenColumns
from recipes.config.build import build
from recipes.config.recipe import plain_values
from recipes.encoders.base import ImageEncoder, TextEncoder

NORMALISATION = {
    "latents": "mean = (posterior mean - shift_factor) * scaling_factor, std = posterior deviation * scaling_factor",
    "tokens": "none: tokens are the encoder's likeliest codes, in raster order",
}
CAPTION_POLICY = {
    "latents": "the caption without surrounding white space, embedded whole up to the text encoder's length; none "
    f'dropped; the null caption is the empty text "", embedded in {NULL_TEXT}',
    "tokens": "the caption without surrounding white space, as text; encoded in training",
}
PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "mosaicml-streaming", "numpy", "pillow")


def run(config: EncodeConfig, sources: dict[str, Any], sets: dict[str, EncodedSet], rank: Rank) -> None:
    """Encodes this rank's shards that are not done yet; merges every set of which all shards are.

    Raises:
        ValueError: a device that is not there, encoders that do not fit the config, folders made with other options,
            input shards that could not be read.
    """
    device = pick_device(config.device, rank.local)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Each operation waits for its slowest thread: one that shares its core with a decoding process holds up all.
        torch.set_num_threads(max(1, torch.get_num_threads() - config.workers))
    # The second pass in fp32 and `precision: fp32` mean fp32, not TF32's ten bits.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    images: ImageEncoder = build(config.image_encoder).to(device)
    texts: TextEncoder | None = None if config.text_encoder is None else build(config.text_encoder).to(device)
    columns = columns_of(config, images, texts)
    options = options_of(config, images, texts)
    for encoded in sets.values():
        encoded.claim(options)
        if texts is not None:
            store_null_text(encoded.out / NULL_TEXT, texts)

    jobs = [Job(label, shard) for label, encoded in sets.items() for shard in encoded.shards]
    todo = [job for job in rank.share(jobs) if not sets[job.label].is_done(job.shard)]
    encoders = ", ".join(f"{encoder.id} ({encoder.precision})" for encoder in (images, texts) if encoder is not None)
    print(
        f"encode: rank {rank.rank} of {rank.world} on {device}: {len(todo)} of {len(jobs)} shards to do, {encoders}",
        flush=True,
    )
    failed = _encode(config, sources, sets, rank, images, texts, columns, options, todo) if todo else {}
    for encoded in sets.values():
        left = len(encoded.remaining())
        if left:
            who = "by a second start" if rank.world == 1 else "by other ranks"
            print(f"{encoded.out}: {left} of {len(encoded.shards)} shards still to be done {who}", flush=True)
        else:
            report(encoded, encoded.merge(describe(config, images, texts, columns, options)))
    if failed:
        first = "; ".join(f"{job.shard}: {problem}" for job, problem in list(failed.items())[:3])
        raise ValueError(f"{len(failed)} input shards could not be read, start again to try them: {first}")


def _encode(
    config: EncodeConfig,
    sources: dict[str, Any],
    sets: dict[str, EncodedSet],
    rank: Rank,
    images: ImageEncoder,
    texts: TextEncoder | None,
    columns: Columns | TokenColumns,
    options: dict[str, Any],
    todo: list[Job],
) -> dict[Job, str]:
    """Encodes jobs; gives those whose input could not be read, with the reason."""
    preparation = Preparation(
        filter=build(config.filter),
        tokenize=None if texts is None else texts.tokenize,
        resolutions=tuple(config.resolutions),
        crop=config.crop,
        crops=config.crops,
        upscale=config.upscale,
        seed=config.seed,
        batch=config.batch,
    )
    storage = Storage(config.size_limit, config.compression, tuple(config.hashes))
    known = next((size for encoded in sets.values() if (size := encoded.samples_a_shard())), None)
    progress = Progress(len(todo), known, quiet=rank.rank != 0)

    def open_writer(job: Job) -> ShardWriter:
        return ShardWriter(sets[job.label].partial(job.shard, rank.rank), job.shard, columns, storage, options)

    def publish(job: Job, done: dict[str, Any]) -> None:
        sets[job.label].publish(job.shard, rank.rank)

    pipeline = Pipeline(images, texts, open_writer, publish, progress)
    started = time.monotonic()
    decoder = Decoder(todo, sources, preparation)
    try:
        pipeline.run(batches(decoder, config.workers, config.prefetch, pin=images.device.type == "cuda"))
    finally:
        progress.close()
    seconds = time.monotonic() - started
    print(
        f"encode: rank {rank.rank}: {progress.pictures:,} pictures in {duration(seconds)}, "
        f"{progress.rate:,.1f} images/s; the encoder waited for data {pipeline.waited / seconds:.0%} of the time",
        flush=True,
    )
    return pipeline.failed


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: a GPU was asked for that PyTorch does not see.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(
            f"device: LOCAL_RANK {local_rank} has no GPU, PyTorch sees {count}; start fewer processes or use cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def columns_of(config: EncodeConfig, images: ImageEncoder, texts: TextEncoder | None) -> Columns | TokenColumns:
    """Shapes of what is stored.

    Raises:
        ValueError: a resolution that the image encoder does not divide.
    """
    for resolution in config.resolutions:
        if resolution % images.downsample:
            raise ValueError(f"resolutions: {resolution} is no multiple of {images.downsample}, as {images.id} needs")
    sides = {resolution: resolution // images.downsample for resolution in config.resolutions}
    assert images.kind == config.kind, f"{config.image_encoder.name} belongs into TOKEN_ENCODERS, or does not"
    if images.kind == "tokens":
        return TokenColumns({r: side**2 for r, side in sides.items()}, config.crops)
    return Columns({r: (images.channels, side, side) for r, side in sides.items()}, (texts.length, texts.width))


def options_of(config: EncodeConfig, images: ImageEncoder, texts: TextEncoder | None) -> dict[str, Any]:
    """Everything that the values in a folder depend on: a folder takes shards of one set of options only."""
    if images.kind == "tokens":
        own: dict[str, Any] = {"crops": config.crops, **images.facts()}
    else:
        own = {
            "scaling_factor": images.scaling_factor,
            "shift_factor": images.shift_factor,
            "text_weights": texts.weights_hash,
            "text_precision": texts.precision,
            "text_layer": texts.layer,
            "tokenizer": texts.tokenizer_id,
            "text_length": texts.length,
        }
    return {
        "resolutions": list(config.resolutions),
        "crop": config.crop,
        "upscale": config.upscale,
        "filter": plain_values(config.filter),
        "image_weights": images.weights_hash,
        "image_precision": images.precision,
        **own,
        "dtype": images.dtype,
        "seed": None if config.crop == "center" else config.seed,
    }


def describe(
    config: EncodeConfig,
    images: ImageEncoder,
    texts: TextEncoder | None,
    columns: Columns | TokenColumns,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What `EncodedSet.merge` cannot count."""
    return {
        "options": options,
        "image_encoder": {
            "component": plain_values(config.image_encoder),
            "id": images.id,
            "weights_hash": images.weights_hash,
            "precision": images.precision,
            **images.facts(),
        },
        "text_encoder": None
        if texts is None
        else {
            "component": plain_values(config.text_encoder),
            "id": texts.id,
            "weights_hash": texts.weights_hash,
            "precision": texts.precision,
            "layer": texts.layer,
            "tokenizer": texts.tokenizer_id,
            "length": texts.length,
            "width": texts.width,
        },
        "resolutions": list(config.resolutions),
        "crop": config.crop,
        "crops": config.crops,
        "upscale": config.upscale,
        "seed": config.seed,
        "filter": plain_values(config.filter),
        "kind": images.kind,
        "dtype": images.dtype,
        "normalisation": NORMALISATION[images.kind],
        "caption_policy": CAPTION_POLICY[images.kind],
        "columns": columns.encodings(),
        "request": config.request(),
        "software": {"python": python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def store_null_text(path: Path, texts: TextEncoder) -> None:
    """Writes the embedding of the empty caption, float16 (L, D), unless it is there.

    Raises:
        ValueError: it is not finite.
    """
    if path.is_file():
        return
    tokens = texts.tokenize([""]).to(texts.device)
    text = texts.encode_tokens(tokens).half()
    if not text.isfinite().all():
        text = texts.encode_tokens(tokens, exact=True).half()
    if not text.isfinite().all():
        raise ValueError(f"text_encoder: {texts.id} gives values that are not finite, also in fp32; check its weights")
    data = io.BytesIO()
    np.save(data, text[0].cpu().numpy())
    write_atomically(path, data.getvalue())


def report(encoded: EncodedSet, manifest: Manifest) -> None:
    """Says what a finished set holds."""
    samples = manifest.samples
    print(
        f"wrote {encoded.out}: {samples:,} pictures of {manifest.shards} input shards, {manifest.bytes / 1e6:,.1f} MB "
        f"({manifest.bytes / samples / 1e3:,.1f} kB a picture); set aside: {summary(manifest.rejected.items())}"
        + (f"; encoded again in fp32: {manifest.reencoded:,}" if manifest.reencoded else "")
    )
    strangers = encoded.strangers()
    if strangers:
        print(f"{encoded.out}: {strangers} folders in shards/ are of no shard of this source and not in the index")
