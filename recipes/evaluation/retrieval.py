"""Retrieval accuracy: how often a contrastive model finds an image's own caption among all captions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from data.image_grid import to_uint8
from data.sources.base import DecodedSample, Sample, Source, samples_of, shards_of
from data.sources.captions import without_surrogates
from data.sources.filters import Filter
from data.transforms import resize_and_crop


def read_pairs(source: Source, number: int | None, seed: int, side: int) -> tuple[list[str], np.ndarray, list[str]]:
    """Images with captions for an evaluation, drawn without replacement.

    Args:
        source: images with captions.
        number: how many are drawn; None: all.
        seed: of the draw.
        side: of the images in pixels.

    Returns:
        The drawn captions (n), their images (n, side, side, 3) uint8, and all captions of the source.

    Raises:
        ValueError: the source has fewer usable images.
    """
    decoder = Filter()
    samples = (sample for shard in shards_of(source) for sample in samples_of(source, shard))
    found = [sample for sample in samples if isinstance(sample, Sample)]
    drawn = {}
    for i in np.random.default_rng(seed).permutation(len(found)).tolist():
        if len(drawn) == number:
            break
        sample = decoder.decode(found[i])
        if isinstance(sample, DecodedSample):  # another one takes the place of an image that cannot be decoded
            drawn[i] = sample
    if not drawn or number is not None and len(drawn) < number:
        wanted = "all" if number is None else number
        raise ValueError(f"--number: {wanted} images wanted, {len(drawn)} found that decode; give fewer or another set")
    drawn = [drawn[i] for i in sorted(drawn)]
    images = np.stack([resize_and_crop(sample.image, side) for sample in drawn])
    everything = [without_surrogates(sample.caption).strip() for sample in found]  # as those of `drawn`
    return [sample.caption for sample in drawn], images, everything


def reconstruct(encoder: Any, images: np.ndarray, batch: int) -> np.ndarray:
    """What is left of images (N, H, W, 3) uint8 when they have been encoded and decoded, `batch` at once."""
    parts = (torch.from_numpy(images[i : i + batch]).to(encoder.device) for i in range(0, len(images), batch))
    return np.concatenate([to_uint8(encoder.reconstruct(pixels)) for pixels in parts])


def ranks(images: np.ndarray, captions: np.ndarray, own: np.ndarray) -> np.ndarray:
    """How many captions fit each image better than its own, plus one: (N,) int64. Captions that fit equally well count.

    So a model that gives every caption the same score finds nothing.

    Args:
        images: (N, E), of length 1.
        captions: (M, E), of length 1, no caption twice.
        own: (N,), the index of each image's own caption.
    """
    similarities = images @ captions.T  # (N, M)
    own_similarities = np.take_along_axis(similarities, own[:, None], axis=1)  # (N, 1)
    return (similarities >= own_similarities).sum(axis=1)


def accuracy(found: np.ndarray) -> dict[str, Any]:
    """Shares of `ranks` that are at most 1 and at most 5, their median, and how many there are."""
    return {
        "images": len(found),
        "top1": round(float((found <= 1).mean()), 4),
        "top5": round(float((found <= 5).mean()), 4),
        "median_rank": float(np.median(found)),
    }
