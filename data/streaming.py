"""Precomputed latents and text embeddings from MDS shards, local or remote, to training batches."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time_ns
from typing import Annotated, Any, Literal

import numpy as np
import torch
from streaming import Stream, StreamingDataset
from streaming.base.dataset import TICK, _Iterator, _ShardState
from streaming.base.storage import CloudDownloader
from torch import Tensor
from torch.utils.data import DataLoader

from data.aliases import InputPath  # noqa: F401 - read from the annotations below
from data.loading import Batch, Loading, Placement
from data.manifest import NAME as MANIFEST
from data.manifest import NULL_TEXT, Manifest
from data.mds_batches import OpenShard, OpenShards, Rows, layouts, path_of
from data.shared_batches import BatchBlocks, Specs, bytes_of

PREFETCH = 4  # batches ready or under way, a worker
TRIES = 8  # to open a shard that may be evicted as soon as it is fetched; streaming's own number
FAILED = "a shard could not be fetched or decompressed; the reason was printed when it happened"


def latents(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    streams: dict[str, Annotated[Any, "stream"]],
    resolution: int,
    text: str = "text",
    expect: dict[str, Any] | None = None,
    caption_dropout: float = 0.0,
    sample_posterior: bool = True,
    flip: float = 0.0,
    workers: int = 2,
    shuffle: bool = True,
    shuffle_algo: Literal["py1e", "py1s", "py1br", "py2s", "naive"] = "py1e",
    shuffle_block: int | None = None,
    predownload: int | None = None,
    cache_limit: str | None = None,
    epoch_size: int | None = None,
    drop_last: bool = True,
) -> Loading:
    """Latents that `precompute/encode.py` wrote. Order, sharding over ranks and exact resumption are the library's.

    The validation set is read once in order, with the posterior's mean and every caption.

    Args:
        streams: encoded sets by label; with proportions, all of them must have one.
        resolution: which of the encoded resolutions to read, in pixels.
        text: column of the text embedding.
        expect: fields that the manifest must have these values in (see `Manifest.check`), beside what the model needs.
        caption_dropout: share of captions replaced by the null caption's embedding, drawn anew each time.
        sample_posterior: draw latents from the posterior each time; false takes its mean.
        flip: share of latents mirrored left to right: near to, but not the same as, encoding the mirrored picture.
        workers: processes that read.
        shuffle: mix the order each epoch (training only).
        shuffle_algo: the library's algorithm.
        shuffle_block: samples that shard parts are mixed over; null: the library's default.
        predownload: samples fetched ahead by a worker; null: the library's default.
        cache_limit: local disk space for remote shards, such as 100gb; null: no limit.
        epoch_size: samples of an epoch; null: all.
        drop_last: leave out the last, incomplete batch of an epoch (training only).

    Raises:
        FileNotFoundError: a stream without a manifest.
        ValueError: a manifest that does not fit the recipe, by field.
    """
    for name, share in (("caption_dropout", caption_dropout), ("flip", flip)):
        if not 0 <= share <= 1:
            raise ValueError(f"latents: {name} is a share from 0 to 1, got {share}")
    if not streams:
        raise ValueError("latents: streams is empty; name at least one encoded set")
    manifests = [encoded.manifest() for encoded in streams.values()]
    first = manifests[0]
    same = {"image_weights": first.image_encoder["weights_hash"], "text_weights": first.text_encoder["weights_hash"]}
    for manifest in manifests:
        manifest.check(resolution=resolution, **requirements, **(expect or {}))
        manifest.check(**same)
    dataset = LatentDataset(
        streams=[Stream(local=s.local, remote=s.remote, **s.options) for s in streams.values()],
        resolution=resolution,
        text=text,
        blocks=workers * PREFETCH + 4 if workers else 0,  # under way or ready, and in use
        batch_size=placement.batch,
        shuffle=shuffle and placement.training,
        shuffle_algo=shuffle_algo,
        shuffle_seed=placement.seed,
        shuffle_block_size=shuffle_block,
        predownload=predownload,
        cache_limit=cache_limit,
        epoch_size=epoch_size,
    )
    loader = DataLoader(
        dataset,
        batch_size=placement.batch,
        collate_fn=dataset.read,
        drop_last=drop_last and placement.training,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=placement.pin,
        generator=torch.Generator(),  # not the one that noise is drawn from
    )
    null_text = next(iter(streams.values())).null_text()
    if placement.training:
        on_device = LatentTransform(null_text, caption_dropout, sample_posterior, flip)
    else:
        on_device = LatentTransform(null_text, 0.0, sample_posterior=False, flip=0.0)
    return Loading(
        loader,
        on_device,
        samples=dataset.size,
        manifest=first,
        resolution=resolution,
        null_text=null_text,
    )


class LatentDataset(StreamingDataset):
    """Samples' numbers in the library's order, and `read` from numbers to a batch.

    Order, sharding, mixing, download, cache and resumption are the library's. Its decoding is not used: an item is the
    sample's number, and `read` fills a batch's memory from the shards.

    Args:
        resolution: which of the encoded resolutions to read, in pixels.
        text: column of the text embedding.
        blocks: see `BatchBlocks`; for worker processes.
        arguments: of StreamingDataset.

    Raises:
        ValueError: shards that `Layout.of` refuses, or that differ in the shapes of these columns.
    """

    def __init__(self, *, resolution: int, text: str, blocks: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        columns = {"mean": f"mean_{resolution}", "std": f"std_{resolution}", "text": text}
        self.layouts = layouts(self.shards, columns)
        self.arrays = self.layouts[0].arrays
        self.files = OpenShards()
        self.blocks = BatchBlocks(blocks, bytes_of(self._specs(self.batch_size)))
        self._decompressed = bytearray(self.num_shards)

    def __iter__(self) -> Iterator[int]:
        """This worker's samples' numbers, in the order of the next epoch.

        Raises:
            RuntimeError: a shard could not be fetched. The library's own loop ends the epoch early then, in silence.
        """
        yield from super().__iter__()
        if self._event.is_set():
            raise RuntimeError(FAILED)

    def _each_sample_id(self, it: _Iterator) -> Iterator[int]:
        """As the library's, but a number goes out once its shard was asked for: `read` waits for it.

        The library lets a thread wait for the shards. With a cache limit, that one waits for ever for a shard that
        another worker evicts before the thread has seen it.
        """
        try:
            while it.yield_index < it.total and not it.should_exit() and not self._event.is_set():
                if it.prepare_index <= it.yield_index:
                    sleep(TICK)
                    continue
                number = it.sample_ids[it.yield_index]
                if number >= 0:  # -1 fills up the last batch
                    yield number
                it.yield_index += 1
            it.on_exit()
        finally:
            it.non_blocking_exit()  # else the fetching thread of an epoch that is left early never ends

    def _ready_thread(self, it: _Iterator) -> None:
        """The library's thread that waits; not needed, see `_each_sample_id`."""
        it.on_exit()

    def get_item(self, sample_id: int, retry: int = 7) -> int:
        """The sample's number, as `read` takes it."""
        return int(sample_id)

    def read(self, numbers: Sequence[int]) -> Batch:
        """A batch. The collate_fn of a DataLoader over this data set.

        Args:
            numbers: B samples' numbers.

        Returns:
            `mean` and `std` (B, C, h, w), `text` (B, L, D), as stored (float16), and `seed` (B,) int64, a function of
            the sample's key. In a worker process they lie in shared memory.

        Raises:
            ValueError: a broken shard.
            RuntimeError: a shard that cannot be fetched, or one that is evicted again and again.
        """
        ids = np.asarray(numbers)
        shards = np.searchsorted(self.spanner.shard_bounds, ids, side="right") - 1
        samples = (ids - self.spanner.shard_bounds[shards]).tolist()
        if self.cache_limit:
            self.files.keep(set(np.flatnonzero(self._shard_states.numpy() == _ShardState.LOCAL).tolist()))
        batch = self.blocks.new(self._specs(len(ids)))
        rows, seeds = Rows(batch), batch["seed"].numpy()
        for row, (shard, sample) in enumerate(zip(shards.tolist(), samples, strict=True)):
            seeds[row] = key_seed(rows.fill(row, self.layouts[shard], self._file(shard), sample))
        self._shard_access_times[shards] = time_ns()
        return batch

    def _specs(self, samples: int) -> Specs:
        specs = {name: ((samples, *array.shape), array.dtype) for name, array in self.arrays.items()}
        return {**specs, "seed": ((samples,), torch.int64)}

    def _file(self, shard: int) -> OpenShard:
        for _ in range(TRIES):
            try:
                if shard in self.files or self._shard_states[shard] == _ShardState.LOCAL:
                    return self.files.get(shard, self.shards[shard])
            except FileNotFoundError:
                self._decompressed[shard] = False
            self.prepare_shard(shard)  # evicted between the library's order and here
        raise RuntimeError(
            f"shard {shard} of {self.streams[self.stream_per_shard[shard]].local} is not there after {TRIES} tries; "
            "raise cache_limit if there is one, else see whether the shard lies in the set"
        )

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetches or decompresses a shard if need be.

        The library asks this for every sample under a lock that all processes of a machine share, which costs more
        than reading the sample. For a shard that is there only its time of use is noted, as the library does on
        reading.
        """
        if self._decompressed[shard_id] and self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time_ns()
            return
        super().prepare_shard(shard_id, blocking)
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._decompressed[shard_id] = os.path.isfile(path_of(self.shards[shard_id]))


class LatentTransform:
    """From stored posterior and caption to what a model trains on; on the device, with its generator.

    Composer saves each rank's generators in checkpoints: what is drawn here goes on exactly after a resume, and
    differs between ranks because their seeds do.

    Args:
        null_text: (L, D), the embedding of the empty caption.
        caption_dropout: share of captions replaced by it.
        sample_posterior: draw from the posterior, or take its mean.
        flip: share of latents mirrored left to right.
    """

    def __init__(self, null_text: Tensor, caption_dropout: float, sample_posterior: bool, flip: float) -> None:
        self.null_text = null_text
        self.caption_dropout = caption_dropout
        self.sample_posterior = sample_posterior
        self.flip = flip

    def __call__(self, batch: Batch) -> Batch:
        """`mean`, `std`, `text`, `seed` to `latents` (B, C, h, w), `text` (B, L, D), both 32-bit, and `seed` (B,)."""
        latents, text = batch["mean"].float(), batch["text"].float()
        if self.sample_posterior:
            latents = latents + batch["std"].float() * torch.randn_like(latents)
        if self.flip:
            mirrored = torch.rand(len(latents), device=latents.device) < self.flip
            latents = torch.where(mirrored[:, None, None, None], latents.flip(-1), latents)
        if self.caption_dropout:
            dropped = torch.rand(len(text), device=text.device) < self.caption_dropout
            self.null_text = self.null_text.to(text)  # moved once
            text = torch.where(dropped[:, None, None], self.null_text, text)
        return {"latents": latents, "text": text, "seed": batch["seed"]}


def key_seed(key: str) -> int:
    """A seed from a sample's key: the same on every machine, in [0, 2^63)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class EncodedSet:
    """Where an encoded set lies, and how much of it is read.

    Attributes:
        local: folder of the set, or of the copies of its shards.
        remote: address that shards are fetched from; None: they all lie in `local`.
        options: further arguments of streaming's `Stream`.
    """

    local: str
    remote: str | None
    options: dict[str, Any]

    def file(self, name: str) -> Path:
        """A file beside the shards, fetched first where the set is remote.

        Raises:
            FileNotFoundError: there is none.
        """
        path = Path(self.local, name)
        if self.remote and not path.is_file():
            self._fetch(name).replace(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there; encode the set first with precompute/encode.py")
        return path

    def _fetch(self, name: str) -> Path:
        """A fresh copy of a remote file, under a name of its own: every rank fetches at the same moment."""
        copy = Path(self.local, f".{name}.{uuid.uuid4().hex}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        address = f"{self.remote.rstrip('/')}/{name}"
        CloudDownloader.get(address).download(address, str(copy), timeout=120.0)
        return copy

    def manifest(self) -> Manifest:
        """What encoded the set.

        Raises:
            FileNotFoundError: the set has none.
            ValueError: the cache holds shards of another set than the one that is at the address now.
        """
        path = Path(self.local, MANIFEST)
        if self.remote and path.is_file():
            fresh = self._fetch(MANIFEST)
            same = fresh.read_bytes() == path.read_bytes()
            fresh.unlink()
            if not same:
                raise ValueError(
                    f"{path} is not the manifest at {self.remote}: delete the folder, or give another cache"
                )
        return Manifest.read(self.file(MANIFEST).parent)

    def null_text(self) -> Tensor:
        """(L, D) float16, the embedding of the empty caption."""
        return torch.from_numpy(np.load(self.file(NULL_TEXT), allow_pickle=False))


def local_set(*, path: InputPath, proportion: float | None = None, repeat: float | None = None) -> EncodedSet:
    """An encoded set on this machine's disks.

    Args:
        path: folder that encode.py wrote.
        proportion: share of the samples that come from this set.
        repeat: times that the set is seen in an epoch, also below 1.
    """
    return EncodedSet(path, None, {"proportion": proportion, "repeat": repeat})


def remote_set(
    *,
    url: str,
    cache: str,
    proportion: float | None = None,
    repeat: float | None = None,
    keep_zip: bool = False,
    validate_hash: str | None = None,
    download_retry: int = 2,
    download_timeout: float = 60.0,
) -> EncodedSet:
    """An encoded set in an object store, fetched shard by shard as training comes to it.

    Args:
        url: address of the folder that encode.py's output was copied to: s3://, gs://, oci://, azure://, ...
        cache: local folder for the fetched shards.
        proportion: share of the samples that come from this set.
        repeat: times that the set is seen in an epoch, also below 1.
        keep_zip: keep the compressed shard beside the decompressed one.
        validate_hash: hash to check shards by, such as sha1, if they were written with it.
        download_retry: further tries of a failed fetch.
        download_timeout: seconds to wait for a shard.
    """
    options = {
        "proportion": proportion,
        "repeat": repeat,
        "keep_zip": keep_zip,
        "validate_hash": validate_hash,
        "download_retry": download_retry,
        "download_timeout": download_timeout,
    }
    return EncodedSet(cache, url, options)
