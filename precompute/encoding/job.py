"""One rank's part of an encode job, from the checked config to finished folders."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.encoded.manifest import NULL_TEXT, Manifest
from data.own_gpu import check_own_gpu
from data.sources.base import InputShard, Source
from data.system.arrays import read_matrix
from data.system.errors import together
from data.system.files import atomic_write, write_text
from data.system.locks import HeldByAnother, held
from data.system.log import every_rank, log
from data.system.ranks import Rank
from data.workers.crash_log import CrashLog
from data.workers.deaths import DecoderDied, worker_deaths
from data.workers.quarantine import Quarantine
from precompute.config import EncodeConfig, source_options
from precompute.encoding.columns import LatentColumns, TokenColumns, check_resolutions
from precompute.encoding.decode import DecodedBatches, Preparation, batches
from precompute.encoding.pipeline import EncodePipeline
from precompute.encoding.progress import EncodeProgress, duration
from precompute.encoding.provenance import encoding_options, manifest_fields
from precompute.encoding.rank_shards import RankShards
from precompute.encoding.writer import ShardWriter, Storage
from precompute.output.output_set import CONFIG, MERGING, NothingEncoded, OutputSet
from precompute.output.problems import Problem
from precompute.output.totals import counts_text
from precompute.output.unreadable import could_not_be_read, listed, not_done
from precompute.output.upload import Uploads
from recipes.config.build import build
from recipes.config.recipe import to_yaml
from recipes.encoders.base import ImageEncoder, TextEncoder
from recipes.encoders.open_clip_models import check_activation
from recipes.encoders.text import open_clip_text

DECODING = "precompute/encoding/decode.py"  # in the stack of a process that died while it read or decoded a sample


def run(config: EncodeConfig, sources: dict[str, Source], sets: dict[str, OutputSet], rank: Rank) -> None:
    """Encodes this rank's shards that are not done yet, then merges every set of which all shards are done.

    Raises:
        ValueError: the device does not exist, the encoders do not fit the config, a folder holds values made with
            other options, or input shards could not be read.
    """
    # Two ranks that upload the same files would abort each other's uploads (`data.remote.multipart`).
    take_over = config.take_over and config.upload is None and rank.world > 1
    shards = RankShards(sets, rank, take_over, config.workers)
    shards.forget_earlier_starts()
    device = pick_device(config.device, rank.local)
    images, texts = load_encoders(config, device)
    columns = columns_of(config, images, texts)
    made_with = encoding_options(config, images, texts)
    options = {label: made_with | source_options(config.sources[label]) for label in sets}
    together(partial(output.check, options[label]) for label, output in sets.items())
    for label, output in sets.items():
        output.claim(options[label])
        write_text(output.out / CONFIG, to_yaml(config))
        if texts is not None:
            store_null_text(output.out / NULL_TEXT, texts)

    todo = shards.left()
    encoders = ", ".join(f"{encoder.id} ({encoder.precision})" for encoder in (images, texts) if encoder is not None)
    every_rank.info(
        f"encode: rank {rank.rank} of {rank.world} on {device}: {len(todo)} of {len(shards.all)} shards to do, "
        f"{encoders}"
    )

    storage = Storage(config.size_limit, config.compression, tuple(config.hashes))

    def open_writer(shard: InputShard) -> ShardWriter:
        folder = sets[shard.label].partial(shard.shard, rank.rank)
        return ShardWriter(folder, shard.shard, columns, storage, options[shard.label])

    known = next((size for output in sets.values() if (size := output.samples_per_shard())), None)
    progress = EncodeProgress(len(todo), known, quiet=rank.rank != 0)
    with Uploads(config.upload is not None) as uploads:
        publish = partial(shards.publish, uploads=uploads)
        pipeline = EncodePipeline(images, texts, open_writer, publish, progress, shards.give_up, shards.keep)
        if config.upload is not None:
            shards.upload_rest(uploads)
        if todo or take_over:
            _encode(pipeline, shards, todo, sources, preparation_of(config, texts), config, rank)
    failed = {shard.shard: problem for shard, problem in pipeline.failed.items()}
    _finish(config, sets, rank, manifest_fields(config, images, texts, columns), options, failed)


def load_encoders(config: EncodeConfig, device: torch.device) -> tuple[ImageEncoder, TextEncoder | None]:
    """The encoders of a job, on their device; None where captions are not embedded.

    Raises:
        ValueError: an encoder cannot be opened, or has another activation than its weights were trained with.
    """
    # The second pass in fp32 and `precision: fp32` mean fp32, not TF32 with its ten bits.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    if config.text_encoder is not None and config.text_encoder.name == "open_clip_text":
        # Not where it is built: what was trained on a set of an earlier version needs the encoder of that set.
        named = signature(open_clip_text).bind(**config.text_encoder.args)
        named.apply_defaults()
        check_activation(named.arguments["model"], named.arguments["pretrained"], "text_encoder")
    images = build(config.image_encoder).to(device)
    return images, None if config.text_encoder is None else build(config.text_encoder).to(device)


def _finish(
    config: EncodeConfig,
    sets: dict[str, OutputSet],
    rank: Rank,
    fields: dict[str, Any],
    options: dict[str, dict[str, Any]],
    failed: dict[str, Problem],
) -> None:
    """Merges every set of which no shard is left, now that this rank's share is done.

    A set of which all samples were rejected is an error, too. The others are complete all the same.

    Args:
        config: of the job.
        sets: by label.
        rank: of this process.
        fields: of the manifests of all sets.
        options: what the values of each set depend on.
        failed: shards that this rank could not read, with the problem.

    Raises:
        ValueError: input shards of a set could not be read, an `Outage` where a store or server did not answer.
    """
    unreadable: dict[str, Problem] = {}
    others = False  # whether shards of any set are left to them
    empty: list[str] = []
    for label, output in sets.items():
        remaining, broken = not_done(output)
        left = remaining - len(broken)
        if left and rank.world > 1:
            others = True
            every_rank.info(f"{output.out}: {left} of {len(output.shards)} shards are left to other ranks")
            continue
        unreadable |= broken
        if not remaining or config.leave_out_unreadable:
            request = fields["request"] | source_options(config.sources[label])
            # Of ranks that end at the same time one is enough, as long as all of them would write the same.
            lock = Path(config.out, MERGING.format(label))
            alone = nullcontext() if config.leave_out_unreadable else held(lock, "{holder}")
            try:
                with alone:
                    _log_result(output, output.merge(fields | {"request": request}, options[label], leave_out=broken))
            except HeldByAnother as error:
                every_rank.info(f"{output.out}: all shards are done; {error} merges them")
            except NothingEncoded as error:
                empty.append(str(error))
        elif rank.world == 1:
            all_shards = len(output.shards)
            log.info(f"{output.out}: {remaining} of {all_shards} shards are left; start the job again to do them")
    if others and failed:
        every_rank.warning(f"encode: rank {rank.rank} could not read: {listed(failed)}")
    if unreadable and not others:
        advice = "" if config.leave_out_unreadable else ", or go on without them by leave_out_unreadable=true"
        raise could_not_be_read(unreadable, advice)
    if empty and not others:
        raise ValueError("; ".join(empty))


def _encode(
    pipeline: EncodePipeline,
    shards: RankShards,
    todo: list[InputShard],
    sources: dict[str, Source],
    preparation: Preparation,
    config: EncodeConfig,
    rank: Rank,
) -> None:
    """Encodes shards. When a process dies of a picture, the shards that are not finished are begun again without it.

    Without decoding processes this one dies, and the next start of the job goes on like that.

    Args:
        pipeline: encodes and writes.
        shards: of this rank; when `todo` are done, it goes on with those that it takes over.
        todo: shards of this rank's share.
        sources: by label.
        preparation: how images are decoded.
        config: of the job.
        rank: of this process.
    """
    progress = pipeline.progress
    crashes = CrashLog(Path(config.out), str(rank.rank), DECODING)
    quarantine = Quarantine("encode")
    crashes.find()
    earlier = list(enumerate(crashes.deaths()))
    hopeless: dict[InputShard, str] = {}
    note, noted = (None, nullcontext) if config.workers else (crashes.mark, crashes.noted)
    pin = pipeline.images.device.type == "cuda"
    started = time.monotonic()
    left, known = todo, False
    try:
        while left or (left := shards.take_more(pipeline.failed.keys())):
            progress.shards = len(pipeline.finished) + len(left)
            for number, death in [] if known else earlier:
                if death.positions[0].shard in left:
                    given_up = quarantine.add(death, -2 - number)  # of another start: no two are in a row
                    again = f"; {crashes.file} notes it: remove the file to try again"
                    hopeless |= {shard: problem + again for shard, problem in given_up.items()}
            for shard in hopeless.keys() & set(left):
                pipeline.fail(shard, Problem(hopeless[shard]))
            left = [shard for shard in left if shard not in pipeline.failed]
            if not left:
                continue
            decoded = DecodedBatches(left, sources, preparation, quarantine.killers, note, shards.begin)
            try:
                with worker_deaths(decoded.places, config.workers), noted():
                    pipeline.run(batches(decoded, config.workers, config.prefetch, pin))
                left, known = [], False
            except DecoderDied as death:
                known = True
                hopeless |= quarantine.add(death, progress.images)
                left = [shard for shard in left if shard not in pipeline.finished and shard not in pipeline.failed]
    finally:
        progress.close()
    if not progress.images + progress.rejected:
        return
    seconds = time.monotonic() - started
    every_rank.info(
        f"encode: rank {rank.rank}: {progress.images:,} images in {duration(seconds)}, "
        f"{progress.rate:,.1f} images/s; the encoder waited for data {pipeline.waited / seconds:.0%} of the time"
    )
    if pipeline.full_captions:
        every_rank.warning(
            f"encode: rank {rank.rank}: {pipeline.full_captions:,} captions fill the {pipeline.texts.length} tokens "
            "of the text encoder, or were cut to them"
        )


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process.

    Args:
        wanted: auto, cpu or gpu.
        local_rank: number of this process on its machine.

    Raises:
        ValueError: a GPU is asked for where PyTorch sees none, or the machine has more processes than GPUs.
    """
    found = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ValueError("device: gpu was asked for, and PyTorch sees none; use auto or cpu")
    check_own_gpu("device")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def columns_of(config: EncodeConfig, images: ImageEncoder, texts: TextEncoder | None) -> LatentColumns | TokenColumns:
    """The columns that are stored. Raises as `check_resolutions`."""
    check_resolutions(config.resolutions, images.downsample, images.id)
    sides = {resolution: resolution // images.downsample for resolution in config.resolutions}
    assert images.kind == config.kind, f"{config.image_encoder.name}: TOKEN_ENCODERS must name all that make tokens"
    if images.kind == "tokens":
        return TokenColumns({r: side**2 for r, side in sides.items()}, config.crops)
    return LatentColumns({r: (images.channels, side, side) for r, side in sides.items()}, (texts.length, texts.width))


def preparation_of(config: EncodeConfig, texts: TextEncoder | None) -> Preparation:
    """How images are decoded and cropped, and captions tokenized."""
    return Preparation(
        filter=build(config.filter),
        tokenize=None if texts is None else texts.tokenize,
        resolutions=tuple(config.resolutions),
        crop=config.crop,
        crops=config.crops,
        upscale=config.upscale,
        seed=config.seed,
        batch=config.batch,
    )


def store_null_text(path: Path, texts: TextEncoder) -> None:
    """Writes the embedding of the empty caption, float16 (L, D), unless it is there already and can be read.

    Raises:
        ValueError: it is not finite.
    """
    with suppress(FileNotFoundError, ValueError):  # training and verify.py would refuse a damaged one
        read_matrix(path, (texts.length, texts.width))
        return
    tokens = texts.tokenize([""]).to(texts.device)
    text = texts.embed(tokens).half()
    if not text.isfinite().all():
        text = texts.embed(tokens, exact=True).half()
    if not text.isfinite().all():
        raise ValueError(f"text_encoder: {texts.id} gives values that are not finite, also in fp32; check its weights")
    with atomic_write(path) as partial, open(partial, "wb") as file:  # np.save would add .npy to a name without it
        np.save(file, text[0].cpu().numpy())


def _log_result(output: OutputSet, manifest: Manifest) -> None:
    samples = manifest.samples
    every_rank.info(
        f"wrote {output.out}: {samples:,} images of {manifest.shards} input shards, {manifest.bytes / 1e6:,.1f} MB "
        f"({manifest.bytes / samples / 1e3:,.1f} kB per image); rejected: {counts_text(manifest.rejected.items())}"
        + (f"; encoded again in fp32: {manifest.reencoded:,}" if manifest.reencoded else "")
    )
    unknown = output.unknown_shards()
    if unknown:
        every_rank.warning(
            f"{output.out}: {unknown} folders in shards/ belong to no shard of this source; the index leaves them out"
        )
