"""Samples, shards and manifests of small encoded sets, for the tests of what an encode job writes."""

import os
import time
from pathlib import Path

import numpy as np

from precompute.encoding.columns import LatentColumns
from precompute.encoding.writer import EncodedSample, ShardWriter, Storage
from precompute.output.claims import LOST, Claims
from precompute.output.output_set import BEGUN, OutputSet

COLUMNS = LatentColumns({8: (2, 4, 4)}, (3, 5))
# What a manifest says that is not counted from the shards.
FIELDS = {
    "image_encoder": {
        "component": {}, "weights_hash": "", "channels": 2, "downsample": 2, "scaling_factor": 1.0, "shift_factor": 0.0,
    },
    "text_encoder": {"component": {}, "weights_hash": "", "length": 1, "width": 1, "tokenizer": ""},
    "resolutions": [8], "crop": "center", "upscale": False, "seed": 1, "filter": {}, "columns": {}, "software": {},
    "dtype": "float16", "normalisation": "", "caption_policy": "", "request": {"text_encoder": None},
}  # fmt: skip


def sample(key: str, value: float = 1.0) -> EncodedSample:
    latent = np.full((2, 4, 4), value, dtype=np.float16)
    row = {
        "key": key, "caption": "c", "width": 9, "height": 8, "crop_8": np.arange(4, dtype=np.int32),
        "mean_8": latent, "std_8": latent, "text": np.zeros((3, 5), np.float16),
    }  # fmt: skip
    sums = np.stack([latent.sum((1, 2)), (latent**2).sum((1, 2)), (latent**2).sum((1, 2))]).astype(float)
    return EncodedSample(row, {8: sums})


def write(output: OutputSet, shard: str, samples: list, options: dict, rank: int = 0) -> None:
    writer = ShardWriter(output.partial(shard, rank), shard, COLUMNS, Storage(), options)
    for number in reversed(range(len(samples))):
        writer.add(number, samples[number])
    writer.end(len(samples))
    assert writer.complete
    writer.finish()
    output.publish(shard, rank)
    if (files := output.to_upload(shard)) is not None:
        output.copy.add(Path(files["folder"]), files["place"], files["names"])


def begin_hours_ago(monkeypatch) -> None:
    """Makes ranks begin shards long before they do anything with them."""
    take = Claims.take

    def hours_ago(claims, shard):
        if taken := take(claims, shard):
            os.utime(claims._folder / shard, times=(time.time() - 2 * LOST,) * 2, follow_symlinks=False)
        return taken

    monkeypatch.setattr(Claims, "take", hours_ago)


def age(output: OutputSet, shard: str) -> float:
    """Seconds since a rank said that it is at work on a shard."""
    return time.time() - (output.out / BEGUN / shard).lstat().st_mtime


def ages_when_published(monkeypatch) -> list[float]:
    """The `age` of each shard that is published from now on, of those that were begun hours before."""
    ages, publish = [], OutputSet.publish

    def looked_at(output, shard, rank):
        ages.append(age(output, shard))
        publish(output, shard, rank)

    begin_hours_ago(monkeypatch)
    monkeypatch.setattr(OutputSet, "publish", looked_at)
    return ages


def fail(error: Exception):
    """A function that raises an error."""

    def act(*arguments):
        raise error

    return act
