"""Local and remote encoded sets: where they are, and what their manifests say."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.aliases import InputPath
from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import NULL_TEXT, Manifest
from data.encoded.mds_index import HASHES
from data.remote.downloads import advice, fetch, store_error
from data.remote.stores import STORES, check_environment, malformed, scheme_of
from data.system.arrays import read_matrix
from data.system.disk_errors import about, disk_error
from data.system.errors import one_line
from data.system.log import log

READ = ("s3", "gs", "oci", "azure", "azure-dl", "hf", "dbfs")  # of mosaicml-streaming's downloaders


@dataclass(frozen=True)
class EncodedSet:
    """An encoded set: where it is, and how much of it is read.

    Attributes:
        local: folder of the set, or of the local copies of its shards.
        remote: address that shards are fetched from; None if all are in `local`.
        options: further arguments of streaming's `Stream`.
    """

    local: str
    remote: str | None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        given = {name: self.options.get(name) for name in ("proportion", "repeat")}
        for name, value in given.items():
            if value is not None and value <= 0:
                raise ValueError(f"stream: {name}: {value}; give a number above 0, or remove the stream")
        if None not in given.values():
            raise ValueError("stream: proportion and repeat contradict each other; give one of them")
        check = self.options.get("validate_hash")
        if check is not None and check not in HASHES:
            raise ValueError(
                f"stream: validate_hash: {check}; give a hash that the set was written with, such as xxh3_64, or null"
            )

    def file(self, name: str) -> Path:
        """The path of a file beside the shards, which is fetched first if the set is remote.

        Raises:
            FileNotFoundError: there is no such file.
        """
        path = Path(self.local, name)
        if self.remote and not path.is_file():
            self._fetch(name).replace(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there; write the set first, with precompute/encode.py or pack.py")
        return path

    def _fetch(self, name: str) -> Path:
        """Fetches a remote file to a new path, because all ranks fetch at the same time.

        Raises:
            OSError: of this disk.
            ValueError: the store refuses it.
            Outage: the store does not answer.
        """
        copy = Path(self.local, f".{name}.{uuid.uuid4().hex}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        address = f"{self.remote.rstrip('/')}/{name}"
        try:
            with about(Path(self.local, name), copy):
                fetch(address, copy, timeout=120.0)
        except Exception as error:  # each store's client has its own errors, without a common base class
            if disk_error(error) is not None:
                raise
            raise store_error(f"{address}: cannot be fetched ({one_line(error)}); {advice(error)}", error) from error
        return copy

    def current(self, name: str) -> Path:
        """As `file`, for one that says what the set holds; a copy of it in the cache is compared with the remote one.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the cache holds shards of another set than the one at the remote address.
        """
        path = Path(self.local, name)
        if self.remote and path.is_file():
            fresh = self._fetch(name)
            same = fresh.read_bytes() == path.read_bytes()
            fresh.unlink()
            if not same:
                raise ValueError(
                    f"{path} is not the one at {self.remote}: the cache is of another set; delete the folder, or give "
                    "another cache"
                )
        return self.file(name)

    def manifest(self) -> Manifest:
        """Reads the manifest of the set. Errors are those of `current` and of `Manifest.read`."""
        return Manifest.read(self.current(MANIFEST).parent)

    def null_text(self, shape: tuple[int, int]) -> Tensor:
        """(L, D) float16, the embedding of the empty caption; `shape` is what the manifest says of texts."""
        return torch.from_numpy(read_matrix(self.file(NULL_TEXT), shape))


def local_set(
    *,
    path: InputPath,
    proportion: float | None = None,
    repeat: float | None = None,
    validate_hash: str | None = None,
) -> EncodedSet:
    """An encoded set on a local disk.

    Args:
        path: folder that precompute/encode.py wrote.
        proportion: share of the samples that come from this set.
        repeat: how often the set is read per epoch; may be below 1.
        validate_hash: hash by which each shard is checked when a process first reads from it, such as xxh3_64; the set
            must have been written with it. null: no check.
    """
    return EncodedSet(path, None, {"proportion": proportion, "repeat": repeat, "validate_hash": validate_hash})


def remote_set(
    *,
    url: str,
    cache: str,
    proportion: float | None = None,
    repeat: float | None = None,
    keep_zip: bool = False,
    validate_hash: str | None = None,
    download_retry: int = 6,
    download_timeout: float = 60.0,
) -> EncodedSet:
    """An encoded set in an object store, whose shards are fetched when training needs them.

    Args:
        url: address of a copy of the folder that precompute/encode.py wrote: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER,
            azure://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER, azure-dl://CONTAINER/FOLDER, oci://, hf://, dbfs:/.
        cache: local folder for the fetched shards.
        proportion: share of the samples that come from this set.
        repeat: how often the set is read per epoch; may be below 1.
        keep_zip: keep compressed shards beside the decompressed ones.
        validate_hash: hash by which shards are checked, such as xxh3_64; the set must have been written with it. null:
            no check.
        download_retry: number of further attempts after a failed download, with pauses of 1, 2, 4, ... s.
        download_timeout: maximum time to wait for a shard, in seconds.

    Raises:
        ValueError: nothing reads from an address of this scheme, its form is wrong, or from `check_environment`.
    """
    scheme = scheme_of(url)
    if scheme and scheme not in READ:
        known = ", ".join(f"{name}://" for name in READ)
        raise ValueError(f"url: {url}: nothing reads from {scheme}://; give {known}, or a path")
    if scheme in STORES and (problem := malformed(url, streamed=True)):
        raise ValueError(f"url: {url}; {problem}")
    check_environment(url)
    options = {
        "proportion": proportion,
        "repeat": repeat,
        "keep_zip": keep_zip,
        "validate_hash": validate_hash,
        "download_retry": download_retry,
        "download_timeout": download_timeout,
    }
    return EncodedSet(os.path.expanduser(cache), url, options)


def check_sets(kind: str, sets: Mapping[str, EncodedSet], epoch_size: int | None) -> None:
    """Check what is known of encoded sets before they are read.

    Args:
        kind: name of the component that reads them.
        sets: by label.
        epoch_size: number of samples per epoch; None: all.

    Raises:
        ValueError: there is no set, or something else in its place, two are in one folder, only some of them have a
            proportion, or `repeat` gives another number of samples.
    """
    if not sets:
        raise ValueError(f"{kind}: streams is empty; name at least one encoded set")
    labels: dict[str, str] = {}
    for label, encoded in sets.items():
        if not isinstance(encoded, EncodedSet) and not hasattr(encoded, "options"):  # as of a component of one's own
            what = "None" if encoded is None else f"an instance of {type(encoded).__name__}"
            raise ValueError(
                f"{kind}: streams.{label} is {what}; its component must return an EncodedSet (data/encoded/sets.py)"
            )
        first = labels.setdefault(os.path.abspath(encoded.local), label)
        if first != label:
            raise ValueError(
                f"{kind}: streams.{first} and streams.{label} have the same folder, {encoded.local}; give each set "
                "once, with a proportion or `repeat` for a larger share"
            )
    without = [label for label, encoded in sets.items() if encoded.options.get("proportion") is None]
    if 0 < len(without) < len(sets):
        raise ValueError(f"{kind}: streams.{without[0]} has no proportion, others have; give all of them one, or none")
    repeated = [label for label, encoded in sets.items() if encoded.options.get("repeat") is not None]
    if repeated and epoch_size is not None:
        raise ValueError(
            f"{kind}: epoch_size and streams.{repeated[0]}.repeat contradict each other; give proportions instead of "
            "repeat, or no epoch_size"
        )


def first_manifest(
    kind: str,
    sets: Mapping[str, EncodedSet],
    epoch_size: int | None,
    resolution: int,
    requirements: Mapping[str, Any],
    expect: Mapping[str, Any] | None,
) -> Manifest:
    """The manifest of the first of some encoded sets, all of which fit the recipe and each other.

    Args:
        kind: what the sets must hold, latents or tokens.
        sets, epoch_size: see `check_sets`, whose errors this raises, too.
        resolution, requirements, expect: see `check_fit`.

    Raises:
        FileNotFoundError: a set has no manifest.
        ValueError: a set is of another kind, does not fit the recipe, or was encoded in another way than the first.
    """
    check_sets(kind, sets, epoch_size)
    manifests = [encoded.manifest() for encoded in sets.values()]
    for manifest in manifests:
        check_fit(manifest, kind, resolution, requirements, expect)
        manifest.check(**manifests[0].encoders())
        warn_of_other_arguments(kind, manifest, manifests[0])
    return manifests[0]


def warn_of_other_arguments(what: str, manifest: Manifest, first: Manifest) -> None:
    """A line, and no error: whether results depend on an argument, only its encoder knows."""
    if others := manifest.other_arguments(first):
        log.warning(
            f"{what}: {manifest.where} and {first.where} are of encoders with equal weights and other arguments: "
            f"{'; '.join(others)}; if results depend on these, encode the sets alike"
        )


def check_fit(
    manifest: Manifest, kind: str, resolution: int, requirements: Mapping[str, Any], expect: Mapping[str, Any] | None
) -> None:
    """
    Args:
        manifest: of an encoded set.
        kind: what it must hold, latents or tokens.
        resolution: the encoded resolution that is read, in pixels.
        requirements: what the model needs, see `Manifest.check`.
        expect: what the recipe expects besides.

    Raises:
        ValueError: the set is another one.
    """
    manifest.check(kind=kind)
    manifest.check(resolution=resolution, **requirements)
    manifest.check(**{"resolution": resolution, **(expect or {})})
