"""The number of samples in an epoch of encoded sets, according to their manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data.cost import Epoch
from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from data.encoded.sets import EncodedSet, check_fit, check_sets


def epoch_of(
    kind: str, streams: Mapping[str, EncodedSet], args: dict[str, Any], stored: Callable[[Path], int | None]
) -> Epoch:
    """The size of an epoch, as far as the manifests lie on this machine.

    Args:
        kind: name of the data component, for messages.
        streams: the sets by label.
        args: of the component: `epoch_size` and `drop_last`.
        stored: gives the number of samples in the set in a folder, None where it has no manifest; see
            `encoded_samples`.

    Raises:
        ValueError: see `check_sets` and `stored`.
    """
    check_sets(kind, streams, args["epoch_size"])
    total: int | None = 0
    for encoded in streams.values():
        samples, repeat = stored(Path(encoded.local)), encoded.options.get("repeat")
        if samples is not None and repeat is not None:
            samples = int(samples * repeat)
        samples = encoded.options.get("choose") or samples  # which components of one's own may give to streaming
        total = None if total is None or samples is None else total + samples
    samples = args["epoch_size"] or total
    return Epoch(samples, incomplete_batch=not args["drop_last"])


def encoded_samples(kind: str, args: dict[str, Any], requirements: dict[str, Any], folder: Path) -> int | None:
    """The number of samples in an encoded set; None where it has no manifest.

    Args:
        kind: what the set holds, latents or tokens.
        args: of the data component: `resolution`, `expect`, and perhaps `text`.
        requirements: see `check_fit`.
        folder: of the set.

    Raises:
        ValueError: the manifest does not fit the recipe.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    check_fit(manifest, kind, args["resolution"], requirements, args["expect"])
    column = args.get("text")
    if column is not None and manifest.columns and column not in manifest.columns:
        raise ValueError(f"{folder}: no column `{column}`; the set has {', '.join(manifest.columns)}")
    return manifest.samples
