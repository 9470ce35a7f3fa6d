"""Encodes drawn records of a set again, from their source: at other batch sizes, and in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.encoded.manifest import Manifest
from data.image_grid import to_uint8
from data.sources.base import InputShard, Rejected, Sample, Source
from data.system.arrays import read_matrix
from precompute.checking.survey import Record
from precompute.encoding.batch import DecodedBatch, ImageFacts
from precompute.encoding.columns import crop_column, stored_key
from precompute.encoding.decode import DecodedBatches, Preparation
from precompute.encoding.encodings import encode, encode_exactly
from recipes.encoders.base import ImageEncoder, TextEncoder

# The largest error of a record that its number format explains: the root mean square of the differences over that of
# the values, and for tokens the share that differs. Values of another network differ by about 1.
LIMITS = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 1e-1}
TOKEN_LIMITS = {"fp32": 0.03, "fp16": 0.1, "bf16": 0.25}
LOOSER = 3.0  # of `std`, which is the exponential of what the network computes


@dataclass
class Difference:
    """Stored values of a column against those of one way to encode it again.

    Attributes:
        largest, mean: of the absolute differences.
        steps: the mean difference over the mean distance of neighbouring fp16 numbers there; a value that is only
            rounded is off by up to 0.5. For tokens, the share that differs.
        worst: the largest relative error of a record, see `LIMITS`.
        key: of that record.
    """

    largest: float = 0.0
    mean: float = 0.0
    steps: float = 0.0
    worst: float = 0.0
    key: str = ""


@dataclass
class Reencoded:
    """The result of encoding records again.

    Attributes:
        differences: by way of encoding, by column.
        originals: uint8 (N, R, R, 3), the first crops at the largest resolution.
        records: N, in the same order.
        faults: one line each.
    """

    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    originals: np.ndarray | None = None
    records: list[Record] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class _Only:
    """The first sample of a source with each of some keys, as the keys are stored.

    A source that was moved gives its shards other ids, whose readable parts stay. Random crops depend on the old id.
    """

    def __init__(self, source: Source, keys: set[str]) -> None:
        self.source = source
        self.keys = keys

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        known = self.source.shards()
        alike = [shard] if shard in known else [one for one in known if _name(one) == _name(shard)]
        left = set(self.keys)
        for sample in self.source.read(alike[0] if len(alike) == 1 else shard):
            if (key := stored_key(sample.key)) in left:
                left.remove(key)  # a second sample of the key was rejected, see `ReadOnce`
                yield sample


def _name(shard: str) -> str:
    """The readable part of a shard's id; see `data.sources.base.shard_id`."""
    return shard.rpartition("-")[0]


def encode_again(
    records: list[Record],
    label: str,
    source: Source,
    preparation: Preparation,
    images: ImageEncoder,
    texts: TextEncoder | None,
    manifest: Manifest,
) -> Reencoded:
    """Reads the records' images and captions from their source and compares what they are encoded to.

    Args:
        records: of the set.
        label: of the source.
        preparation: as in the encode job; its batch size is one of those that are tried.
        images, texts: the encoders, on their device.
        manifest: of the set.
    """
    result = Reencoded()
    found: dict[tuple[str, str], tuple[ImageFacts, dict[int, Tensor], Tensor]] = {}
    unread: set[str] = set()
    keys: dict[str, set[str]] = {}
    for record in records:
        keys.setdefault(record.shard, set()).add(record.key)
    for shard, wanted in keys.items():
        only = _Only(source, wanted)
        for batch in DecodedBatches([InputShard(label, shard)], {label: only}, preparation):
            _take(batch, found, result)
            unread |= {failed.shard for failed, _ in batch.failures}
    for record in records:
        if record.shard in unread:
            continue
        if (record.shard, record.key) not in found:
            result.faults.append(f"record {record.key} of {record.shard}: its source does not give it (any more)")
        elif problem := _facts_differ(record, found[record.shard, record.key][0], images.kind):
            result.faults.append(f"record {record.key} of {record.shard}: {problem}")
        else:
            result.records.append(record)
    if not result.records:
        return result
    mine = [found[record.shard, record.key] for record in result.records]
    pixels = {r: torch.stack([squares[r] for _, squares, _ in mine]) for r in preparation.resolutions}
    tokens = torch.stack([tokens for _, _, tokens in mine])
    result.originals = pixels[max(pixels)][:, 0].numpy()
    stored = {name: np.stack([r.arrays[name] for r in result.records]) for name in _compared(result.records[0])}
    ways = {f"batches of {n}": (n, False) for n in sorted({1, 5, preparation.batch})} | {"fp32": (5, True)}
    for way, (size, exact) in ways.items():
        fresh = _encode(pixels, tokens, size, exact, images, texts)
        result.differences[way] = {
            name: _difference(stored[name], fresh[name], result.records) for name in stored
        }
    _judge(result, manifest)
    return result


def _take(
    batch: DecodedBatch, found: dict[tuple[str, str], tuple[ImageFacts, dict[int, Tensor], Tensor]], result: Reencoded
) -> None:
    for shard, problem in batch.failures:
        result.faults.append(f"input shard {shard.shard} cannot be read: {problem}")
    for position, rejected in batch.rejected:
        reason = f"{rejected.reason} {rejected.detail}".strip()
        result.faults.append(f"record {rejected.key} of {position.shard.shard}: rejected now as {reason}")
    for row, image in enumerate(batch.images):
        squares = {resolution: pixels[row].clone() for resolution, pixels in batch.pixels.items()}
        tokens = batch.tokens[row] if len(batch.tokens) else batch.tokens
        found[image.position.shard.shard, image.key] = image, squares, tokens


def _facts_differ(record: Record, image: ImageFacts, kind: str) -> str | None:
    if record.caption != image.caption:
        return f"stored caption {record.caption!r:.60}, the source has {image.caption!r:.60}"
    for resolution, boxes in image.boxes.items():
        stored, fresh = record.arrays[f"crop_{resolution}"], crop_column(kind, boxes)
        if not np.array_equal(stored, fresh):
            return f"stored crop_{resolution} {stored.tolist()}, the source gives {fresh.tolist()}"
    return None


def _compared(record: Record) -> list[str]:
    return [name for name in record.arrays if not name.startswith("crop_")]


def _encode(
    pixels: dict[int, Tensor], tokens: Tensor, size: int, exact: bool, images: ImageEncoder, texts: TextEncoder | None
) -> dict[str, np.ndarray]:
    """The columns of N images, encoded in batches of `size`, and in fp32 where that is not finite, as the job does."""
    parts: dict[str, list[np.ndarray]] = {}
    for begin in range(0, len(tokens), size):
        rows = slice(begin, begin + size)
        squares = {r: p[rows] for r, p in pixels.items()}
        made = encode(squares, tokens[rows], images, texts, exact).to_cpu()
        made.wait()
        for row in made.not_finite(len(tokens[rows])):
            made.replace(row, encode_exactly(row, squares, tokens[rows], images, texts))
        if made.text is not None:
            parts.setdefault("text", []).append(made.text.numpy())
        for resolution, stored in made.images.items():
            for name, array in stored.arrays.items():
                parts.setdefault(f"{name}_{resolution}", []).append(array.numpy().astype(images.dtype, copy=False))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _difference(stored: np.ndarray, fresh: np.ndarray, records: list[Record]) -> Difference:
    """Compares (N, ...) arrays. A value that is not finite makes its record's error infinite."""
    rows = len(stored)
    if stored.dtype.kind != "f":
        differs = (stored != fresh).reshape(rows, -1).mean(1)
        worst = int(differs.argmax())
        share = float(differs.mean())
        return Difference(float((stored != fresh).max()), share, share, float(differs[worst]), records[worst].key)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        distance = np.abs(stored.astype(np.float64) - fresh).reshape(rows, -1)
    size = np.sqrt(np.square(fresh.astype(np.float64)).reshape(rows, -1).mean(1))
    relative = np.sqrt(np.square(distance).mean(1)) / np.maximum(size, 1e-12)
    relative = np.where(np.isfinite(relative), relative, np.inf)
    worst = int(relative.argmax())
    step = np.spacing(np.abs(fresh)).astype(np.float64).mean()
    mean = float(distance.mean())
    return Difference(float(distance.max()), mean, mean / float(step), float(relative[worst]), records[worst].key)


def _judge(result: Reencoded, manifest: Manifest) -> None:
    """A fault for each column and way whose worst record is off by more than rounding explains."""
    image, text = manifest.image_encoder["precision"], (manifest.text_encoder or {}).get("precision")
    for way, columns in result.differences.items():
        for name, difference in columns.items():
            if name.startswith("tokens_"):
                limit, what = TOKEN_LIMITS[image], "share of tokens that differ"
            else:
                limit, what = LIMITS[text if name == "text" else image], "relative error"
                limit *= LOOSER if name.startswith("std_") else 1.0
            if not difference.worst <= limit:
                result.faults.append(
                    f"column {name}, {way}: {what} {difference.worst:.3g} in record {difference.key}; rounding "
                    f"makes up to {limit:g}"
                )


def null_text_faults(file: Path, texts: TextEncoder, manifest: Manifest) -> list[str]:
    """A line if the embedding of the empty caption in a file is not what the text encoder makes.

    Args:
        file: float16 (L, D), as the manifest says.
        texts: the text encoder, on its device.
        manifest: of the set.
    """
    stored = read_matrix(file, manifest.text_shape)
    fresh = texts.encode([""])[0].half().cpu().numpy()
    found = _difference(stored[None], fresh[None], [Record("", "", "", {})]).worst
    limit = LIMITS[manifest.text_encoder["precision"]]
    if found <= limit:
        return []
    return [f"{file}: relative error of the empty caption's embedding {found:.3g}; rounding makes up to {limit:g}"]


def decoded(records: list[Record], images: ImageEncoder, resolution: int) -> np.ndarray:
    """Images uint8 (N, R, R, 3) of the stored latents, or of the first crops' tokens, at a resolution in pixels."""
    pictures = []
    for record in records:  # one by one: a decoder takes much more memory than an encoder
        if images.kind == "tokens":
            side = resolution // images.downsample
            grid = record.arrays[f"tokens_{resolution}"][:1].reshape(1, side, side).astype(np.int64)
            pictures.append(to_uint8(images.decode(torch.from_numpy(grid).to(images.device))))
        else:
            latents = torch.from_numpy(record.arrays[f"mean_{resolution}"][None].copy()).to(images.device)
            pictures.append(to_uint8(images.decode(latents)))
    return np.concatenate(pictures)


def psnr(originals: np.ndarray, pictures: np.ndarray) -> float:
    """Peak signal-to-noise ratio of uint8 images, in dB, over all of them."""
    error = np.square(originals.astype(np.float64) - pictures).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-12)))


def as_values(result: Reencoded) -> dict[str, Any]:
    """The differences as JSON-compatible values."""
    return {
        way: {name: vars(difference) for name, difference in columns.items()}
        for way, columns in result.differences.items()
    }
