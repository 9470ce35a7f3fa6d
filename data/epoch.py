"""The number of samples in an epoch of encoded sets, according to their manifests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.cost import Epoch
from data.manifest import NAME as MANIFEST
from data.manifest import Manifest


def epoch_of(
    kind: str, sets: Iterable[tuple[str, float | None]], args: dict[str, Any], requirements: dict[str, Any]
) -> Epoch:
    """The size of an epoch, as far as the manifests lie on this machine.

    Args:
        kind: what the sets hold, latents or tokens.
        sets: folder of each set, and how often it is read per epoch (None: once).
        args: of the data component: `resolution`, `expect`, `epoch_size`, `drop_last`, and perhaps `text`.
        requirements: what the model needs, see `Manifest.check`.

    Raises:
        ValueError: a manifest that does not fit the recipe.
    """
    total: float | None = 0.0
    for folder, repeat in sets:
        if not (Path(folder) / MANIFEST).is_file():
            total = None
            continue
        manifest = Manifest.read(Path(folder))
        manifest.check(kind=kind, resolution=args["resolution"], **requirements, **(args["expect"] or {}))
        column = args.get("text")
        if column is not None and manifest.columns and column not in manifest.columns:
            raise ValueError(f"{folder}: no column `{column}`; the set has {', '.join(manifest.columns)}")
        if total is not None:
            total += manifest.samples * (1.0 if repeat is None else repeat)
    samples = args["epoch_size"] or (None if total is None else int(total))
    return Epoch(samples, incomplete_batch=not args["drop_last"])
