"""Images that a set shares with another one, or has twice, by all cosine similarities of their embeddings (exact)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.image_grid import picture_grid, save_png
from data.score_files import FOLDER, read_facts, read_scores
from data.sources.base import DecodedSample, Sample, Source
from data.sources.filters import Filter, decoded
from data.system.files import write_json
from data.system.log import log
from data.transforms import resize_and_crop
from precompute.config import EncodeConfig
from precompute.scoring.job import QUANTILES
from recipes.config.build import build

BLOCK = 4096  # rows of a matrix product, which takes BLOCK * BLOCK floats
KEPT = 10  # most similar images that are listed per image
ON_SHEET = 24  # pairs
SIDE = 128  # pixels of an image on the sheet
EQUAL = 1e-6  # below 1, from which on similarities are 1: 32-bit products of equal rows differ from it by less


@dataclass(frozen=True)
class Image:
    """An image by its place: the input shard and the key in it."""

    shard: str
    key: str


def similar_rows(
    one: np.ndarray, other: np.ndarray, threshold: float
) -> tuple[np.ndarray, list[tuple[int, int, float]]]:
    """All cosine similarities of two sets of rows, block by block.

    Args:
        one: (N, E), of about length 1: in 16 bits it is up to 0.0002 off, and 1 is the similarity of equal rows alone.
        other: (M, E), likewise, M > 0.
        threshold: the smallest similarity of rows that are listed.

    Returns:
        The largest similarity of each row of `one`, (N,) float32, and (i, j, similarity) of all pairs at or above the
        threshold.
    """
    largest, pairs = np.full(len(one), -np.inf, np.float32), []
    for first in range(0, len(one), BLOCK):
        rows = _of_length_1(one[first : first + BLOCK])
        for begin in range(0, len(other), BLOCK):
            similar = rows @ _of_length_1(other[begin : begin + BLOCK]).T  # (n, m)
            similar[similar > 1 - EQUAL] = 1
            block = largest[first : first + BLOCK]
            np.maximum(block, similar.max(1), out=block)
            found = np.argwhere(similar >= threshold).tolist()
            pairs += [(first + i, begin + j, float(similar[i, j])) for i, j in found]
    return largest, pairs


def _of_length_1(rows: np.ndarray) -> np.ndarray:
    """Rows as float32, divided by their lengths. One of zeros stays: it is similar to none."""
    rows = rows.astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=EQUAL)


def write_shared(config: EncodeConfig, label: str, inside: str, threshold: float) -> dict[str, Any]:
    """List the images of one set that are in another: OUT/LABEL/scores/shared.json, with shared.png to look at.

    The other set is read shard by shard, so that only the first one's embeddings are in memory. Of a set in itself,
    each pair is listed once.

    Args:
        config: of the encode job.
        label: of the set that is looked through.
        inside: label of the set in which its images are looked for.
        threshold: smallest cosine similarity of two images that count as the same.

    Raises:
        FileNotFoundError: a shard has not been scored.
        ValueError: the sets were scored by different models.
    """
    sources = {name: build(config.sources[name]) for name in dict.fromkeys((label, inside))}
    folders = {name: Path(config.out, name, FOLDER) for name in sources}
    hashes = {read_facts(folder).get("weights_hash") for folder in folders.values()}
    if len(hashes) > 1:
        raise ValueError(f"--shared: {label} and {inside} were scored by different models; delete one folder of scores")
    images: list[Image] = []
    embeddings = []
    shards = sources[label].shards()
    for shard in shards:
        scores = read_scores(folders[label], shard)
        images += [Image(shard, key) for key in scores.keys]
        embeddings.append(scores.embeddings)
    own = np.concatenate([part for part in embeddings if len(part)])
    places = {image: number for number, image in enumerate(images)}
    closest = np.full(len(own), -np.inf, np.float32)
    found: dict[int, list[tuple[float, Image]]] = {}
    for shard in sources[inside].shards():
        scores = read_scores(folders[inside], shard)
        if not len(scores.keys):
            continue
        others = [Image(shard, key) for key in scores.keys]
        largest, similar = similar_rows(own, scores.embeddings, threshold)
        closest = np.maximum(closest, largest)
        for i, j, similarity in similar:
            if label != inside or i < places[others[j]]:
                listed = found.setdefault(i, [])
                listed.append((similarity, others[j]))
                listed.sort(key=lambda pair: -pair[0])
                del listed[KEPT:]
    pairs = sorted(((s, images[i], other) for i, listed in found.items() for s, other in listed), key=lambda p: -p[0])
    result: dict[str, Any] = {
        **read_facts(folders[label]),
        "set": label,
        "in": inside,
        "threshold": threshold,
        "images": len(images),
        "shared": len(found),
        "shards": shards,  # those of the source that `unshared` can judge
        "pairs": [{"similarity": round(s, 5), "image": vars(one), "other": vars(other)} for s, one, other in pairs],
    }
    if label != inside:
        result["nearest"] = {f"{share:g}": round(float(np.quantile(closest, share)), 5) for share in QUANTILES}
    write_json(folders[label] / "shared.json", result, indent=1)
    sheet = folders[label] / "shared.png"
    sheet.unlink(missing_ok=True)  # of another set or threshold
    if pairs:
        _sheet(pairs[:ON_SHEET], sources[label], sources[inside], build(config.filter), sheet)
    counted = f"{len(found):,} of {len(images):,} images of {label} are in {inside}"
    log.info(f"{folders[label] / 'shared.json'}: {counted} (cosine similarity of at least {threshold:g})")
    return result


def _sheet(pairs: list[tuple[float, Image, Image]], source: Source, other: Source, decoder: Filter, file: Path) -> None:
    """Each pair's images beside each other, the most similar ones first. No file where none can be read any more."""
    ones = _pictures(source, [one for _, one, _ in pairs], decoder)
    others = _pictures(other, [two for _, _, two in pairs], decoder)
    shown = [(one, two, s) for s, one, two in pairs if one in ones and two in others]
    if not shown:
        return
    pictures = np.stack([picture for one, two, _ in shown for picture in (ones[one], others[two])])
    captions = [text for one, two, s in shown for text in (f"{one.key}, {s:.4f}", two.key)]
    save_png(picture_grid(pictures, captions, columns=8), file)


def _pictures(source: Source, images: list[Image], decoder: Filter) -> dict[Image, np.ndarray]:
    """Central squares of some images of a source, which is read as far as their shards go."""
    wanted, found = set(images), {}
    for shard in {image.shard for image in images}:
        for sample in source.read(shard):
            if isinstance(sample, Sample) and (image := Image(shard, sample.key)) in wanted:
                picture = decoded(decoder, sample, SIDE)
                if isinstance(picture, DecodedSample):
                    found[image] = resize_and_crop(picture.image, SIDE)
    return found
