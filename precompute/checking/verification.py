"""Verifies encoded sets and reports what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.encoded.manifest import NULL_TEXT, Manifest
from data.image_grid import picture_grid, save_png
from data.system.files import write_json
from data.system.log import log
from precompute.checking.file_figures import print_faults
from precompute.checking.reencode import Reencoded, as_values, decoded, encode_again, null_text_faults, psnr
from precompute.checking.survey import Survey, figures, survey
from precompute.config import EARLIER_RESAMPLING, RESAMPLING, EncodeConfig
from precompute.encoding.columns import LatentColumns, TokenColumns
from precompute.encoding.job import columns_of, pick_device, preparation_of
from precompute.encoding.provenance import manifest_fields
from recipes.config.build import build
from recipes.encoders.base import ImageEncoder, TextEncoder

# Fields of the manifest that the values do not depend on, or that say how they were computed.
NOT_COMPARED = {"request", "software", "normalisation", "caption_policy"}
NOT_OF_ENCODERS = {"component", "id", "precision"}
ON_SHEET = 24  # records


def verify(config: EncodeConfig, labels: list[str], records: int, seed: int, out: Path, workers: int) -> bool:
    """Verifies sets of an encode job and prints a report.

    Args:
        config: of the job.
        labels: of the sets.
        records: number of records of each set that are encoded again.
        seed: of the records that are drawn.
        out: folder for figures and contact sheets.
        workers: number of processes that read the files.

    Returns:
        Whether all of them hold.

    Raises:
        ValueError, FileNotFoundError: a set has no manifest, or the encoders or the source cannot be built.
    """
    manifests = {label: Manifest.read(Path(config.out, label)) for label in labels}
    sources = {label: build(config.sources[label]) for label in labels}
    torch.backends.cudnn.allow_tf32 = False
    device = pick_device(config.device, 0)
    images: ImageEncoder = build(config.image_encoder).to(device)
    texts: TextEncoder | None = None if config.text_encoder is None else build(config.text_encoder).to(device)
    columns = columns_of(config, images, texts)
    preparation = preparation_of(config, texts)
    holds = True
    for label, manifest in manifests.items():
        folder = Path(config.out, label)
        progress = out / f".{label}.progress.json"
        found = survey(folder, manifest, records, np.random.default_rng(seed), workers, progress)
        faults = [*_other_options(config, images, texts, columns, manifest), *found.faults]
        again = Reencoded()
        if not faults:
            # Where the set is damaged or was made with other options, other values say nothing more.
            again = encode_again(found.records, label, sources[label], preparation, images, texts, manifest)
            faults += again.faults
            if texts is not None:
                faults += null_text_faults(folder / NULL_TEXT, texts, manifest)
        values: dict[str, Any] = {"holds": not faults, "faults": faults, **figures(found), "again": as_values(again)}
        if again.records:
            values["psnr"] = _contact_sheet(again, images, max(config.resolutions), out / f"{label}.png")
        file = out / f"{label}.json"
        write_json(file, values, indent=1)
        progress.unlink(missing_ok=True)
        _report(folder, found, again, values, file)
        holds &= not faults
    return holds


def _other_options(
    config: EncodeConfig,
    images: ImageEncoder,
    texts: TextEncoder | None,
    columns: LatentColumns | TokenColumns,
    manifest: Manifest,
) -> list[str]:
    """A line for each field of the manifest that another job than this one wrote."""
    fields = json.loads(json.dumps(manifest_fields(config, images, texts, columns)))
    lines = []
    for name, mine in fields.items():
        if name in NOT_COMPARED or (name == "seed" and config.crop == "center"):
            continue
        stored = getattr(manifest, name)
        if isinstance(mine, dict) and isinstance(stored, dict) and name.endswith("_encoder"):
            pairs = [(f"{name}.{key}", stored.get(key), mine[key]) for key in mine if key not in NOT_OF_ENCODERS]
        else:
            earlier = name == RESAMPLING and stored is None and mine is not None and config.crop == manifest.crop
            pairs = [(name, EARLIER_RESAMPLING if earlier else stored, mine)]
        lines += [
            f"{manifest.where}: {key} is {one}, this job has {other}" for key, one, other in pairs if one != other
        ]
    return lines


def _contact_sheet(again: Reencoded, images: ImageEncoder, resolution: int, path: Path) -> float | None:
    """Writes originals with what their stored values decode to on the right. Returns the PSNR in dB, or None."""
    shown = again.records[:ON_SHEET]
    originals = again.originals[: len(shown)]
    try:
        pictures = decoded(shown, images, resolution)
    except ValueError as error:  # a dVAE without its decoder
        log.warning(f"no contact sheet: {error}")
        return None
    pairs = np.stack([originals, pictures], axis=1).reshape(-1, *originals.shape[1:])
    captions = [text for record in shown for text in (record.caption, "decoded")]
    save_png(picture_grid(pairs, captions, columns=8), path)
    return psnr(originals, pictures)


def _report(folder: Path, found: Survey, again: Reencoded, values: dict[str, Any], file: Path) -> None:
    log.info(f"{folder}: {found.samples:,} samples in {found.files:,} files, {found.hashes:,} hashes compared")
    for name, largest in found.largest.items():
        used = f", {found.used[name]:,} different codes" if name in found.used else f", largest {largest:.4g}"
        log.info(f"  {name}: {found.nonfinite[name]:,} not finite, {found.saturated[name]:,} saturated{used}")
    for way, columns in again.differences.items():
        log.info(f"  {len(again.records)} records again, {way}:")
        for name, d in columns.items():
            kind = "share that differs" if name.startswith("tokens_") else "fp16 steps"
            log.info(
                f"    {name}: error up to {d.largest:.3g}, mean {d.mean:.3g} ({d.steps:.3g} {kind}), worst record "
                f"{d.worst:.3g}"
            )
    if values.get("psnr") is not None:
        log.info(f"  decoded against the originals: PSNR {values['psnr']:.1f} dB")
    print_faults(values["faults"], file)
