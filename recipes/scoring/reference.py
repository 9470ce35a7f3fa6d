"""The reference of an evaluation: its pictures, its captions, and features of the pictures that are computed once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from data.sources.base import DecodedSample, Rejected, Sample, samples_of, shards_of
from data.sources.captions import without_surrogates
from data.sources.filters import Filter
from data.system.arrays import read_matrix
from data.system.files import atomic_write
from data.system.log import log
from data.transforms import resize_and_crop

BATCH = 256  # pictures in memory at once
RESIZE = "shorter side to the resolution, centre crop, bicubic, antialiased"


def fingerprint(values: Any) -> str:
    """Twelve letters that change with JSON-compatible values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def read_reference(
    source: Any, images: int | None, seed: int, key: str = "reference.images", pictures: bool = True
) -> list[Sample]:
    """Samples of a source that have a caption, drawn without replacement, in stored order.

    Args:
        source: of pictures and captions.
        images: number of samples; None: all.
        seed: of the draw.
        key: of the config that has the number, for messages.
        pictures: False: samples have empty files, for a rank that needs the captions only.

    Raises:
        ValueError: the source has no samples, or fewer than are asked for.
    """
    found: list[Sample] = []
    left_out: Counter[str] = Counter()
    for sample in (sample for shard in shards_of(source) for sample in samples_of(source, shard)):
        if isinstance(sample, Rejected):
            left_out[sample.reason] += 1
        elif not sample.caption.strip():
            left_out["empty_caption"] += 1
        else:
            caption = without_surrogates(sample.caption)  # as in training; no tokenizer takes them
            found.append(replace(sample, caption=caption, image=sample.image if pictures else b""))
    if left_out and pictures:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(left_out.items()))
        log.info(f"reference: {left_out.total()} of {left_out.total() + len(found)} samples are left out: {reasons}")
    if not found:
        raise ValueError("reference.source: empty; name pictures with captions")
    if images is not None and images > len(found):
        raise ValueError(f"{key}: {images} wanted, and the source has {len(found)}; give at most as many")
    order = np.random.default_rng(seed).permutation(len(found))[:images]
    return [found[i] for i in sorted(order)]


def captions_of(samples: list[Sample], images: int | None, seed: int, key: str = "images") -> list[str]:
    """The captions that images are generated for: one per picture, drawn without replacement. Arguments as of
    `read_reference`.

    Raises:
        ValueError: more are asked for than there are.
    """
    captions = [sample.caption.strip() for sample in samples]
    if images is None:
        return captions
    if images > len(captions):
        raise ValueError(
            f"{key}: {images} wanted, and the reference has {len(captions)} captions; give at most as many"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(captions))[:images]
    return [captions[i] for i in sorted(order)]


def blurred(pictures: np.ndarray, radius: int) -> np.ndarray:
    """Pictures (N, H, W, 3) uint8 after a Gaussian blur of a radius in pixels (Pillow's); 0 changes nothing."""
    if radius == 0:
        return pictures
    filter = ImageFilter.GaussianBlur(radius)
    return np.stack([np.asarray(Image.fromarray(picture).filter(filter)) for picture in pictures])


def decoded(samples: list[Sample], resolution: int) -> Iterator[np.ndarray]:
    """Central squares (N, resolution, resolution, 3) uint8 of the samples that decode, at most `BATCH` at once."""
    decoder, lost = Filter(), 0
    for start in range(0, len(samples), BATCH):
        part = samples[start : start + BATCH]
        found = map(decoder.decode, part)
        squares = [resize_and_crop(sample.image, resolution) for sample in found if isinstance(sample, DecodedSample)]
        lost += len(part) - len(squares)
        if squares:
            yield np.stack(squares)
    if lost:
        log.warning(f"reference: {lost} of {len(samples)} pictures do not decode and are left out")


def content(samples: list[Sample]) -> str:
    """A digest of samples: of their keys, captions and files."""
    digest = hashlib.sha256()
    for sample in samples:
        image = sample.image if isinstance(sample.image, bytes) else sample.image.tobytes()
        text = f"{sample.key}\0{sample.caption}\0{len(image)}\0"  # names in archives may not be text
        digest.update(text.encode("utf-8", "surrogatepass") + hashlib.sha256(image).digest())
    return digest.hexdigest()


def reference_features(
    samples: list[Sample], resolution: int, radii: list[int], extractor: Any, folder: Path
) -> dict[int, np.ndarray]:
    """Features (N, D) of the reference by radius of blur, from the cache in `folder` where they are there.

    Args:
        samples: of the reference.
        resolution: side in pixels that they get first, that of the generated images.
        radii: of the blur, in pixels.
        extractor: a `Features`.
        folder: of the cache.

    Raises:
        ValueError: a file of the cache is damaged.
    """
    facts = {"content": content(samples), "resolution": resolution, "resize": RESIZE, "extractor": extractor.hash}
    files = {radius: folder / f"{fingerprint({**facts, 'blur': radius})}.npy" for radius in radii}
    missing = [radius for radius, file in files.items() if not file.is_file()]
    if missing:
        found: dict[int, list[np.ndarray]] = {radius: [] for radius in missing}
        for pictures in decoded(samples, resolution):
            for radius in missing:
                found[radius].append(extractor(blurred(pictures, radius))["features"])
        for radius, parts in found.items():
            with atomic_write(files[radius]) as partial, open(partial, "wb") as stream:
                np.save(stream, np.concatenate(parts) if parts else np.empty((0, 0), np.float32), allow_pickle=False)
    advice = "delete it, and start the same command again"
    return {radius: read_matrix(file, advice=advice) for radius, file in files.items()}
